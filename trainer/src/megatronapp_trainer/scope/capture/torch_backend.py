"""Torch as the backend of vector filters: the same walk over the tree as the numpy reference has.

Nothing here reads a value back from the device, and constants travel as arguments of kernels.
"""

from collections.abc import Callable, Mapping

import torch

from megatronapp_common.filters.evaluate import OPERATORS
from megatronapp_common.filters.reducers import Histogram
from megatronapp_common.filters.syntax import Function, Operator, Reduction

_FUNCTIONS: Mapping[Function, Callable[[torch.Tensor], torch.Tensor]] = {
    Function.NEGATIVE: torch.neg,
    Function.ABS: torch.abs,
    Function.SQRT: torch.sqrt,
    Function.SQUARE: torch.square,
}


def _mean(values: torch.Tensor) -> torch.Tensor:
    return values.mean(-1, keepdim=True)


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(-1, keepdim=True)


def _max(values: torch.Tensor) -> torch.Tensor:
    return values.amax(-1, keepdim=True)


def _min(values: torch.Tensor) -> torch.Tensor:
    return values.amin(-1, keepdim=True)


def _std(values: torch.Tensor) -> torch.Tensor:
    return values.std(-1, correction=0, keepdim=True)


_REDUCTIONS: Mapping[Reduction, Callable[[torch.Tensor], torch.Tensor]] = {
    Reduction.MEAN: _mean,
    Reduction.SUM: _sum,
    Reduction.MAX: _max,
    Reduction.MIN: _min,
    Reduction.STD: _std,
}


class TorchBackend:
    """Torch, in one type of numbers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def apply(self, function: Function, values: torch.Tensor) -> torch.Tensor:
        """A function of each element."""
        return values.to(self._dtype) if function is Function.FLOAT else _FUNCTIONS[function](values)

    def binary(self, sign: Operator, left: torch.Tensor | float, right: torch.Tensor | float) -> torch.Tensor:
        """An operator between elements."""
        found: torch.Tensor = OPERATORS[sign](left, right)
        return found

    def where(self, condition: torch.Tensor, yes: torch.Tensor | float, no: torch.Tensor | float) -> torch.Tensor:
        """Choose between two values by a condition."""
        found: torch.Tensor = torch.where(condition, yes, no)
        return found.to(self._dtype)

    def reduce(self, reduction: Reduction, values: torch.Tensor) -> torch.Tensor:
        """Over the last axis, which stays with length one."""
        return _REDUCTIONS[reduction](values)

    def part(self, values: torch.Tensor, bounds: slice) -> torch.Tensor:
        """A part of the last axis."""
        return values[..., bounds]

    def count(self, histogram: Histogram, values: torch.Tensor) -> torch.Tensor:
        """Numbers in each bin, as the last axis. One more bin takes what lies outside."""
        inside = (values >= histogram.lo) & (values <= histogram.hi)
        scaled = ((values - histogram.lo) * histogram.scale).floor().clamp(max=histogram.bins - 1)
        index = torch.where(inside, scaled, histogram.bins).long()
        counts = values.new_zeros((*values.shape[:-1], histogram.bins + 1))
        return counts.scatter_add_(-1, index, torch.ones_like(values))[..., :-1]
