"""Evaluation of a tree, by numpy here and by torch in the trainer, which has another backend.

Vectors are the last axis; a single number for each pixel keeps an axis of length one, so that all shapes broadcast.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatronapp_common.filters.reducers import Histogram
from megatronapp_common.filters.syntax import (
    Apply,
    Binary,
    DataVector,
    Function,
    IndexedElement,
    MergedReduction,
    Node,
    Number,
    Operator,
    Reduce,
    Reduction,
    Slice,
    Where,
)

Array = npt.NDArray[Any]
A = TypeVar("A")


class ArrayBackend(Protocol[A]):
    """Operations of an array library. Constants are plain floats, never both operands."""

    def apply(self, function: Function, values: A) -> A:
        """Apply a function to each element."""
        ...

    def binary(self, sign: Operator, left: A | float, right: A | float) -> A:
        """Combine elements by an operator."""
        ...

    def where(self, condition: A, yes: A | float, no: A | float) -> A:
        """Select `yes` where the condition is true, otherwise `no`."""
        ...

    def reduce(self, reduction: Reduction, values: A) -> A:
        """Reduce the last axis, which keeps length one."""
        ...

    def part(self, values: A, bounds: slice) -> A:
        """Take a part of the last axis."""
        ...

    def count(self, histogram: Histogram, values: A) -> A:
        """Count the numbers in each bin, the last axis. The bin is floor((value - lo) * scale); hi is in the last."""
        ...


OPERATORS: Mapping[Operator, Callable[[Any, Any], Any]] = {
    Operator.ADD: operator.add,
    Operator.SUBTRACT: operator.sub,
    Operator.MULTIPLY: operator.mul,
    Operator.DIVIDE: operator.truediv,
    Operator.POWER: operator.pow,
    Operator.LESS: operator.lt,
    Operator.LESS_EQUAL: operator.le,
    Operator.GREATER: operator.gt,
    Operator.GREATER_EQUAL: operator.ge,
    Operator.EQUAL: operator.eq,
    Operator.NOT_EQUAL: operator.ne,
}
"""Operators of Python, which arrays of numpy and torch both support."""


def evaluate(node: Node, data: A, backend: ArrayBackend[A], merged: Sequence[A] = ()) -> A:
    """Return the value of a tree over data [..., elements], or over merged results."""
    value = _TreeEvaluator(data, backend, merged).value(node)
    assert not isinstance(value, float)
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class _TreeEvaluator(Generic[A]):
    data: A
    backend: ArrayBackend[A]
    merged: Sequence[A]

    def value(self, node: Node) -> A | float:
        if isinstance(node, Number):
            return node.value
        if isinstance(node, DataVector):
            return self.data
        if isinstance(node, MergedReduction):
            return self.merged[node.index]
        inner = [self.value(part) for part in node.parts]
        if isinstance(node, Binary):
            return self.backend.binary(node.operator, *inner)
        first, *others = inner
        assert not isinstance(first, float)
        return self.backend.where(first, *others) if isinstance(node, Where) else self._reduce_single(node, first)

    def _reduce_single(self, node: Node, operand: A) -> A:
        match node:
            case Apply():
                return self.backend.apply(node.function, operand)
            case Reduce():
                return self.backend.reduce(node.reduction, operand)
            case Slice() | IndexedElement():
                return self.backend.part(operand, node.slice)
            case _:
                raise AssertionError(f"{type(node).__name__} has no value")


class NumpyBackend:
    """Operations by numpy, in the dtype of the data."""

    _FUNCTIONS: Mapping[Function, Callable[[Array], Array]] = {
        Function.NEGATIVE: np.negative,
        Function.ABS: np.abs,
        Function.SQRT: np.sqrt,
        Function.SQUARE: np.square,
    }
    _REDUCTIONS: Mapping[Reduction, Callable[..., Array]] = {
        Reduction.MEAN: np.mean,
        Reduction.SUM: np.sum,
        Reduction.MAX: np.max,
        Reduction.MIN: np.min,
        Reduction.STD: np.std,
    }

    def __init__(self, dtype: npt.DTypeLike = np.float32) -> None:
        self._dtype = np.dtype(dtype)

    def apply(self, function: Function, values: Array) -> Array:
        """Apply a function to each element."""
        return values.astype(self._dtype) if function is Function.FLOAT else self._FUNCTIONS[function](values)

    def binary(self, sign: Operator, left: Array | float, right: Array | float) -> Array:
        """Combine elements by an operator."""
        found: Array = OPERATORS[sign](left, right)
        return found

    def where(self, condition: Array, yes: Array | float, no: Array | float) -> Array:
        """Select `yes` where the condition is true, otherwise `no`."""
        return np.where(condition, yes, no).astype(self._dtype, copy=False)

    def reduce(self, reduction: Reduction, values: Array) -> Array:
        """Reduce the last axis, which keeps length one."""
        return self._REDUCTIONS[reduction](values, axis=-1, keepdims=True)

    def part(self, values: Array, bounds: slice) -> Array:
        """Take a part of the last axis."""
        return values[..., bounds]

    def count(self, histogram: Histogram, values: Array) -> Array:
        """Numbers in each bin, as the last axis."""
        inside = (values >= histogram.lo) & (values <= histogram.hi)
        scaled = np.floor((np.where(inside, values, self._dtype.type(0)) - histogram.lo) * histogram.scale)
        index = np.where(inside, np.minimum(scaled, histogram.bins - 1), histogram.bins).astype(np.intp)
        rows = index.reshape(-1, index.shape[-1])
        rows = rows + np.arange(len(rows))[:, None] * (histogram.bins + 1)
        counts = np.bincount(rows.ravel(), minlength=len(rows) * (histogram.bins + 1))
        return counts.reshape(*index.shape[:-1], -1)[..., :-1].astype(self._dtype)
