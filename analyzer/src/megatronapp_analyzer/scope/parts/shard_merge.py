"""States of shards become numbers of whole pixels: those that one rank would send that holds the whole vector. Pure."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.filters.shard_plan import ReductionPlan

MAX_NUMBERS = 1 << 21
"""States of all tensors of a step, of all shards; more are refused, whatever a rank says that there are."""
AT_ONCE = 1 << 20
"""Of them so many lie side by side while they are merged."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """What one rank sent of a shard: states [rows, layers, columns], and their places in the whole."""

    shard: int
    rows: NDArray[np.intp]
    layers: NDArray[np.intp]
    values: NDArray[np.float32]


def combined(plan: ReductionPlan, parts: Sequence[ShardState], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Numbers [rows, layers, pixels x values], `shape` being rows and layers; NaN where a shard of a pixel is missing.

    Where several parts have the same, the last one counts.
    """
    rows, layers = shape
    whole = _whole(plan, parts, shape)
    out = np.full((rows, layers, plan.pixels * plan.values), np.nan, np.float32)
    merged = np.flatnonzero(whole.any(axis=(1, 2)))
    at_once = max(1, AT_ONCE // max(1, layers * plan.shards * plan.columns))
    for first in range(0, merged.size, at_once):
        chosen = merged[first : first + at_once]
        numbers = np.where(whole[chosen][..., None], _numbers(plan, parts, chosen, shape), np.float32(np.nan))
        out[chosen] = numbers.reshape(chosen.size, layers, -1)
    return out


def _whole(plan: ReductionPlan, parts: Sequence[ShardState], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Of which rows and layers all shards of each pixel are there."""
    there = np.zeros((*shape, plan.shards), np.bool_)
    for part in parts:
        there[:, :, part.shard][np.ix_(part.rows, part.layers)] = True
    found: NDArray[np.bool_] = np.logical_and.reduceat(there, plan.shard_bounds[:-1], axis=-1)
    return found


def _numbers(
    plan: ReductionPlan, parts: Sequence[ShardState], chosen: NDArray[np.intp], shape: tuple[int, int]
) -> NDArray[np.float32]:
    """Of the rows that are chosen; of a pixel that is not whole they mean nothing."""
    rows, layers = shape
    states = np.zeros((chosen.size, layers, plan.shards, plan.columns), np.float32)
    places = np.full(rows, -1, np.intp)
    places[chosen] = np.arange(chosen.size)
    for part in parts:
        at = places[part.rows]
        inside = at >= 0
        states[:, :, part.shard][np.ix_(at[inside], part.layers)] = part.values[inside]
    return plan.combine(np.split(states, plan.shards, axis=-2)).astype(np.float32, copy=False)
