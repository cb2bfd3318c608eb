"""Merges states of shards to numbers of whole pixels, as one rank with the whole vector would send them. Pure."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.filters.shard_plan import ReductionPlan

MAX_NUMBERS = 1 << 21
"""Limit of the states of all tensors and shards of a step; more are refused."""
AT_ONCE = 1 << 20
"""States that are merged at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """States of one shard from one rank, [rows, layers, columns], and their indices in the whole."""

    shard: int
    rows: NDArray[np.intp]
    layers: NDArray[np.intp]
    values: NDArray[np.float32]


def combined(plan: ReductionPlan, parts: Sequence[ShardState], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return numbers [rows, layers, pixels x values] for `shape`, rows and layers; NaN where a shard of a pixel is
    missing.

    Where several parts have the same states, the last one is used.
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
    """Return for which rows and layers all shards of each pixel have arrived."""
    there = np.zeros((*shape, plan.shards), np.bool_)
    for part in parts:
        there[:, :, part.shard][np.ix_(part.rows, part.layers)] = True
    found: NDArray[np.bool_] = np.logical_and.reduceat(there, plan.shard_bounds[:-1], axis=-1)
    return found


def _numbers(
    plan: ReductionPlan, parts: Sequence[ShardState], chosen: NDArray[np.intp], shape: tuple[int, int]
) -> NDArray[np.float32]:
    """Return numbers of the chosen rows; those of incomplete pixels have no meaning."""
    rows, layers = shape
    states = np.zeros((chosen.size, layers, plan.shards, plan.columns), np.float32)
    places = np.full(rows, -1, np.intp)
    places[chosen] = np.arange(chosen.size)
    for part in parts:
        at = places[part.rows]
        inside = at >= 0
        states[:, :, part.shard][np.ix_(at[inside], part.layers)] = part.values[inside]
    return plan.combine(np.split(states, plan.shards, axis=-2)).astype(np.float32, copy=False)
