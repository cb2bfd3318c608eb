"""Reduction plans: what each shard computes for a reducer, and how the shards' results become one answer.

Where each pixel is within one shard, shards compute final numbers, and merging concatenates them. Where a pixel
consists of several shards, they compute states (sums, largest values, means with squared deviations) that merge; a
reducer without such a state is refused. Merging needs no device: merge and finish are numpy.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatronapp_common.errors import FilterError, ReductionPlanError
from megatronapp_common.filters import pixels as cutting
from megatronapp_common.filters import types
from megatronapp_common.filters.evaluate import A, Array, ArrayBackend, NumpyBackend, evaluate
from megatronapp_common.filters.expression import Expression
from megatronapp_common.filters.reducers import Histogram, Reducer
from megatronapp_common.filters.syntax import (
    Function,
    IndexedElement,
    MergedReduction,
    Node,
    Operator,
    Reduce,
    Reduction,
    Slice,
    walk,
)


class MergeOperation(enum.Enum):
    """Operation that merges the same column of several shards."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    SPREAD = "spread"
    """Two columns: mean, and sum of squared deviations from it."""


_OVER_SHARDS = {MergeOperation.SUM: np.add, MergeOperation.MAX: np.maximum, MergeOperation.MIN: np.minimum}
_MERGES = {
    Reduction.SUM: MergeOperation.SUM,
    Reduction.MEAN: MergeOperation.SUM,
    Reduction.MAX: MergeOperation.MAX,
    Reduction.MIN: MergeOperation.MIN,
}


@dataclasses.dataclass(frozen=True, slots=True)
class ShardOutput:
    """Output of a shard for each of its pixels."""

    source: Node | Histogram
    """A number for each pixel; for SPREAD the vector; or the histogram, which counts data."""
    merge: MergeOperation

    @property
    def columns(self) -> int:
        """Number of columns of the output."""
        if isinstance(self.source, Histogram):
            return self.source.bins
        return 2 if self.merge is MergeOperation.SPREAD else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PixelGroup:
    """Pixels of a shard with equal width, which are computed together."""

    width: int
    starts: tuple[int, ...]
    """First column of each in the shard."""
    places: tuple[int, ...]
    """Index of each among the shard's pixels."""

    def index(self) -> npt.NDArray[np.intp]:
        """Return the shard's columns of each pixel: [pixels, width]."""
        return np.asarray(self.starts, dtype=np.intp)[:, None] + np.arange(self.width, dtype=np.intp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgram:
    """Computation of one shard: from [..., width] to [..., pixels, columns]."""

    width: int
    pixels: int
    groups: tuple[PixelGroup, ...]
    outputs: tuple[ShardOutput, ...]

    @property
    def columns(self) -> int:
        """Numbers for each pixel."""
        return sum(output.columns for output in self.outputs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReductionPlan:
    """A reducer prepared for a state of `width` numbers, divided into `pixels` and held by `shards`."""

    width: int
    pixels: int
    shards: int
    merged: bool
    """True if each pixel consists of several shards, false if each is within one."""
    outputs: tuple[ShardOutput, ...]
    result: Node | None
    """Tree over merged results, if more is computed from them."""
    reductions: tuple[Reduction, ...]
    """Reductions of the merged outputs, if `result` is present."""

    @property
    def edges(self) -> tuple[int, ...]:
        """Edges of the pixels in the unsharded vector: the same for every number of shards."""
        return cutting.pixel_edges(self.width, self.pixels)

    @property
    def columns(self) -> int:
        """Numbers that a shard outputs for each pixel."""
        return sum(output.columns for output in self.outputs)

    @property
    def values(self) -> int:
        """Final numbers for each pixel: 1, or the bins of a histogram."""
        return 1 if self.result is not None else self.columns

    @property
    def shard_bounds(self) -> tuple[int, ...]:
        """First shard of each pixel, and as last entry the number of shards; for a plan that merges."""
        return tuple(edge // (self.width // self.shards) for edge in self.edges)

    def shard_pixels(self, shard: int) -> range:
        """Return the pixels that this shard holds, in whole or part. Raises ReductionPlanError for an unknown shard."""
        if not 0 <= shard < self.shards:
            raise ReductionPlanError(f"there is no shard {shard} among {self.shards}; write 0 to {self.shards - 1}")
        size = self.width // self.shards
        first, end = shard * size, (shard + 1) * size
        pairs = enumerate(itertools.pairwise(self.edges))
        inside = [index for index, (start, stop) in pairs if start < end and stop > first]
        return range(inside[0], inside[-1] + 1)

    def program(self, shard: int) -> ShardProgram:
        """Return the computation of a shard. Raises ReductionPlanError for an unknown one."""
        held = self.shard_pixels(shard)
        size = self.width // self.shards
        first = shard * size
        spans = [(0, size)] if self.merged else [(self.edges[p] - first, self.edges[p + 1] - first) for p in held]
        return ShardProgram(width=size, pixels=len(held), groups=_groups(spans), outputs=self.outputs)

    def merge(self, parts: Sequence[Array]) -> Array:
        """Merge the results of all shards, in their order, to [..., pixels, columns]. Raises ReductionPlanError."""
        if len(parts) != self.shards:
            raise ReductionPlanError(f"{len(parts)} parts of {self.shards} shards cannot be merged; wait for all")
        if not self.merged:
            return np.concatenate(parts, axis=-2)
        states = np.concatenate(parts, axis=-2).astype(np.float64)
        blocks = [states[..., first:end, :] for first, end in itertools.pairwise(self.shard_bounds)]
        return np.stack([self._merge_pixel(block) for block in blocks], axis=-2)

    def _merge_pixel(self, block: Array) -> Array:
        """Merge one pixel: [..., shards, columns] -> [..., columns]."""
        ends = list(itertools.accumulate(output.columns for output in self.outputs))
        pieces = zip(self.outputs, [0, *ends], ends, strict=False)
        size = self.width // self.shards
        with np.errstate(all="ignore"):
            return np.concatenate([_merged(output.merge, block[..., a:b], size) for output, a, b in pieces], axis=-1)

    def finish(self, states: Array) -> Array:
        """Return final numbers [..., pixels, values] of merged states, as 32-bit floats."""
        if self.result is None:
            with np.errstate(over="ignore"):
                return states.astype(np.float32, copy=False)
        counts = np.diff(self.edges)[:, None].astype(np.float64)
        ends = itertools.accumulate(output.columns for output in self.outputs)
        columns = zip(self.reductions, ends, strict=True)
        with np.errstate(all="ignore"):
            merged = [_finished(reduction, states[..., end - 1 : end], counts) for reduction, end in columns]
            return evaluate(self.result, states, NumpyBackend(np.float64), merged).astype(np.float32)

    def combine(self, parts: Sequence[Array]) -> Array:
        """Return final numbers of the results of all shards. Raises ReductionPlanError."""
        return self.finish(self.merge(parts))


@functools.lru_cache(maxsize=256)
def compile_reduction_plan(reducer: Reducer, *, width: int, pixels: int, shards: int = 1) -> ReductionPlan:
    """Compile the plan of a reducer. Raises ReductionPlanError for an impossible partition, or FilterError."""
    merged = cutting.merges(width, pixels, shards)
    outputs, result, reductions = _compile(reducer, merged, shards)
    if isinstance(reducer, Expression):
        edges = cutting.pixel_edges(width, pixels)
        for size in sorted({stop - start for start, stop in itertools.pairwise(edges)}):
            types.length(reducer.root, size)
    return ReductionPlan(
        width=width,
        pixels=pixels,
        shards=shards,
        merged=merged,
        outputs=outputs,
        result=result,
        reductions=reductions,
    )


def compute(program: ShardProgram, data: A, backend: ArrayBackend[A]) -> list[A]:
    """Return the outputs of a program for the pixels of one group [..., pixels, width], as columns."""
    return [column for output in program.outputs for column in _columns(output, data, backend)]


def run(program: ShardProgram, shard: Array, *, dtype: npt.DTypeLike = np.float32) -> Array:
    """Run a program on a shard [..., width] in `dtype`; return [..., pixels, columns]. The reference for devices."""
    out = np.empty((*shard.shape[:-1], program.pixels, program.columns), dtype)
    with np.errstate(all="ignore"):
        for group in program.groups:
            data = shard[..., group.index()].astype(dtype, copy=False)
            out[..., list(group.places), :] = np.concatenate(compute(program, data, NumpyBackend(dtype)), axis=-1)
    return out


def _columns(output: ShardOutput, data: A, backend: ArrayBackend[A]) -> list[A]:
    if isinstance(output.source, Histogram):
        return [backend.count(output.source, data)]
    value = evaluate(output.source, data, backend)
    if output.merge is not MergeOperation.SPREAD:
        return [value]
    mean = backend.reduce(Reduction.MEAN, value)
    deviations = backend.apply(Function.SQUARE, backend.binary(Operator.SUBTRACT, value, mean))
    return [mean, backend.reduce(Reduction.SUM, deviations)]


def _groups(spans: list[tuple[int, int]]) -> tuple[PixelGroup, ...]:
    sizes = [stop - start for start, stop in spans]
    groups = {size: [place for place, other in enumerate(sizes) if other == size] for size in sorted(set(sizes))}
    return tuple(
        PixelGroup(width=size, starts=tuple(spans[place][0] for place in places), places=tuple(places))
        for size, places in groups.items()
    )


Compiled = tuple[tuple[ShardOutput, ...], Node | None, tuple[Reduction, ...]]


def _compile(reducer: Reducer, merged: bool, shards: int) -> Compiled:
    if isinstance(reducer, Histogram):
        return (ShardOutput(reducer, MergeOperation.SUM),), None, ()
    if not merged:
        return (ShardOutput(reducer.root, MergeOperation.SUM),), None, ()
    found: list[Reduce] = []
    result = _split(reducer.root, found, shards)
    return tuple(map(_state, found)), result, tuple(node.reduction for node in found)


def _state(node: Reduce) -> ShardOutput:
    if node.reduction is Reduction.STD:
        return ShardOutput(node.operand, MergeOperation.SPREAD)
    merge = _MERGES[node.reduction]
    return ShardOutput(Reduce(Reduction.SUM, node.operand) if merge is MergeOperation.SUM else node, merge)


def _split(node: Node, found: list[Reduce], shards: int) -> Node:
    """Replace the reductions of a tree with merged results, and append them to `found`."""
    if isinstance(node, Reduce):
        _check_mergeable(node, shards)
        if node not in found:
            found.append(node)
        return MergedReduction(found.index(node))
    if isinstance(node, IndexedElement):
        raise _spread(node, "an element cannot be taken", shards)
    return node.with_parts([_split(part, found, shards) for part in node.parts])


def _check_mergeable(node: Reduce, shards: int) -> None:
    for below in walk(node.operand):
        if isinstance(below, Slice | IndexedElement):
            raise _spread(below, "a part of the vector cannot be taken", shards)
        if isinstance(below, Reduce):
            raise _spread(below, f"{node.reduction} cannot wait for the {below.reduction} in it", shards)


def _spread(node: Node, problem: str, shards: int) -> FilterError:
    return FilterError(
        node.column,
        f"{problem} where a pixel lies on several of {shards} shards; ask for {shards} pixels, or a multiple of that, "
        "or reduce the whole vector in one step",
    )


def _merged(merge: MergeOperation, block: Array, size: int) -> Array:
    """Merge over the shards, the last axis but one; each has `size` elements."""
    if merge is MergeOperation.SPREAD:
        return _merged_spread(block, size)
    found: Array = _OVER_SHARDS[merge].reduce(block, axis=-2)
    return found


def _merged_spread(block: Array, size: int) -> Array:
    """Merge mean and squared deviations as Chan, Golub and LeVeque 1979, for samples of equal size."""
    means, squares = block[..., 0], block[..., 1]
    mean = means.mean(axis=-1)
    between = size * np.square(means - mean[..., None]).sum(axis=-1)
    return np.stack([mean, squares.sum(axis=-1) + between], axis=-1)


def _finished(reduction: Reduction, last: Array, counts: Array) -> Array:
    """Finish a merged reduction from its last column."""
    match reduction:
        case Reduction.MEAN:
            return last / counts
        case Reduction.STD:
            found: Array = np.sqrt(last / counts)
            return found
        case _:
            return last
