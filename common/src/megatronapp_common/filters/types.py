"""Constructors of the nodes of vector filters, which check types and compute constants in 32-bit floats."""

import difflib
from collections.abc import Callable, Mapping

import numpy as np

from megatronapp_common.errors import FilterError
from megatronapp_common.filters.syntax import (
    Apply,
    Binary,
    DataVector,
    Function,
    IndexedElement,
    Node,
    Number,
    Operator,
    Reduce,
    Reduction,
    Slice,
    Where,
)

_FUNCTIONS: Mapping[Function, Callable[[np.float32], np.float32]] = {
    Function.NEGATIVE: np.negative,
    Function.ABS: np.abs,
    Function.SQRT: np.sqrt,
    Function.SQUARE: np.square,
    Function.FLOAT: np.float32,
}
_OPERATORS: Mapping[Operator, Callable[[np.float32, np.float32], np.float32]] = {
    Operator.ADD: np.add,
    Operator.SUBTRACT: np.subtract,
    Operator.MULTIPLY: np.multiply,
    Operator.DIVIDE: np.divide,
    Operator.POWER: np.power,
}
COUNTS_TRUTHS = {Reduction.SUM, Reduction.MEAN}


def number(value: float, column: int) -> Number:
    """Make a constant. Raises FilterError if a 32-bit float cannot hold it."""
    with np.errstate(all="ignore"):
        rounded = np.float32(value)
    if not np.isfinite(rounded):
        raise FilterError(column, "the number here is not finite or passes 3.4e38; write a smaller one")
    return Number(float(rounded), column=column)


def apply(function: Function, operand: Node, column: int) -> Node:
    """Apply a function to each element. Raises FilterError."""
    if operand.boolean:
        if function is not Function.FLOAT:
            raise _no_number(operand, column)
        return Apply(function, operand, column=column)
    if isinstance(operand, Number):
        with np.errstate(all="ignore"):
            return number(float(_FUNCTIONS[function](np.float32(operand.value))), column)
    return operand if function is Function.FLOAT else Apply(function, operand, column=column)


def binary(operator: Operator, left: Node, right: Node, column: int) -> Node:
    """Combine two nodes by an operator. Raises FilterError."""
    for side in (left, right):
        if side.boolean:
            raise _no_number(side, side.column, chained=operator.compares)
    if not (isinstance(left, Number) and isinstance(right, Number)):
        return Binary(operator, left, right, column=column)
    if operator.compares:
        raise FilterError(column, "this compares two constants; compare something of data, such as data > 0")
    with np.errstate(all="ignore"):
        return number(float(_OPERATORS[operator](np.float32(left.value), np.float32(right.value))), column)


def where(condition: Node, yes: Node, no: Node, column: int) -> Node:
    """Select one of two nodes for each element. Raises FilterError."""
    if not condition.boolean:
        raise FilterError(condition.column, "where begins with a comparison; write where(data > 0, data, 0)")
    for side in (yes, no):
        if side.boolean:
            raise _no_number(side, side.column)
    return Where(condition, yes, no, column=column)


def reduce(reduction: Reduction, operand: Node, column: int) -> Node:
    """Reduce a vector to one number. Raises FilterError."""
    if not operand.vector:
        raise FilterError(column, f"{reduction} needs a vector, and this is one number already; leave it out")
    if operand.boolean:
        if reduction not in COUNTS_TRUTHS:
            raise _no_number(operand, column)
        operand = Apply(Function.FLOAT, operand, column=operand.column)
    return Reduce(reduction, operand, column=column)


def part(operand: Node, bounds: slice, column: int) -> Node:
    """Take a slice of a vector. Raises FilterError."""
    if not operand.vector:
        raise FilterError(column, "this is one number and has no parts; take the part of data, as in data[:8]")
    step = 1 if bounds.step is None else bounds.step
    if step < 1:
        raise FilterError(column, f"a step of {step} is not possible; write 1 or more")
    if bounds.start in {None, 0} and bounds.stop is None and step == 1:
        return operand
    return Slice(operand, bounds.start, bounds.stop, step, column=column)


def element(operand: Node, index: int, column: int) -> Node:
    """Take one element of a vector. Raises FilterError."""
    largest = isinstance(operand, Reduce) and operand.reduction in {Reduction.MAX, Reduction.MIN}
    if largest and index == 0:
        return operand  # torch's max and min along an axis return the values first, and then their indices
    if largest:
        raise FilterError(column, "the index of the largest is not available; omit the index")
    if not operand.vector:
        raise FilterError(column, "this is one number and has no elements; take one of data, as in data[0]")
    if operand.boolean:
        raise _no_number(operand, operand.column)
    return IndexedElement(operand, index, column=column)


def length(node: Node, width: int) -> int | None:
    """Return the node's number of elements where data has `width`; None for a single one. Raises FilterError."""
    found = [size for size in [length(below, width) for below in node.parts] if size is not None]
    if isinstance(node, DataVector):
        return width
    if isinstance(node, Slice):
        return _sliced(node, found[0], width)
    if isinstance(node, IndexedElement) and not -found[0] <= node.index < found[0]:
        raise FilterError(node.column, f"there is no element {node.index}: a pixel has {width} numbers here")
    if len(set(found)) > 1:
        raise FilterError(
            node.column,
            f"vectors of {' and '.join(map(str, found))} elements do not fit together where a pixel has {width} "
            "numbers; take parts of equal length, or reduce them first",
        )
    return found[0] if node.vector else None


def _sliced(node: Slice, size: int, width: int) -> int:
    kept = len(range(*node.slice.indices(size)))
    if kept == 0:
        raise FilterError(
            node.column, f"nothing is left of a pixel of {width} numbers; use fewer pixels, or begin earlier"
        )
    return kept


def nearest(name: str, known: list[str]) -> str:
    """Return a question that suggests a known name similar to `name`, or an empty text."""
    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _no_number(node: Node, column: int, *, chained: bool = False) -> FilterError:
    if chained and node.boolean:
        return FilterError(column, "one comparison at a time; write where(data > a, where(data < b, x, y), y)")
    return FilterError(column, "this is true or false, not a number; write (data > 0).float(), or a where")
