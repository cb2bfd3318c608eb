"""States of shards become numbers of whole pixels: those that one rank would send that holds the whole vector. Pure."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.scope.plan import Plan

MAX_NUMBERS = 1 << 26
"""States of one tensor of a step, of all shards; more are refused, whatever a rank says that there are."""
AT_ONCE = 1 << 20
"""Of them so many lie side by side while they are merged."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one rank sent of a shard: states [rows, layers, columns], and their places in the whole."""

    shard: int
    rows: NDArray[np.intp]
    layers: NDArray[np.intp]
    values: NDArray[np.float32]


def combined(plan: Plan, parts: Sequence[Held], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Numbers [rows, layers, pixels x values], `shape` being rows and layers; NaN where a shard of a pixel is missing.

    Where several parts have the same, the last one counts.
    """
    rows, layers = shape
    out = np.empty((rows, layers, plan.pixels * plan.values), np.float32)
    for block in _blocks(rows, max(1, AT_ONCE // max(1, layers * plan.shards * plan.columns))):
        out[block] = _block(plan, parts, block, layers)
    return out


def _blocks(rows: int, at_once: int) -> Iterator[slice]:
    for first in range(0, rows, at_once):
        yield slice(first, min(rows, first + at_once))


def _block(plan: Plan, parts: Sequence[Held], block: slice, layers: int) -> NDArray[np.float32]:
    rows = block.stop - block.start
    states = np.zeros((rows, layers, plan.shards, plan.columns), np.float32)
    there = np.zeros(states.shape[:-1], np.bool_)
    for part in parts:
        inside = (part.rows >= block.start) & (part.rows < block.stop)
        at = np.ix_(part.rows[inside] - block.start, part.layers)
        states[:, :, part.shard][at] = part.values[inside]
        there[:, :, part.shard][at] = True
    found = plan.combine(np.split(states, plan.shards, axis=-2))
    whole = np.logical_and.reduceat(there, plan.shard_bounds[:-1], axis=-1)
    numbers = np.where(whole[..., None], found, np.float32(np.nan)).astype(np.float32)
    return numbers.reshape(rows, layers, plan.pixels * plan.values)
