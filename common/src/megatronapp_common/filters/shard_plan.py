"""From a reducer, a width, a number of pixels and shards to what each shard computes, and how that becomes one answer.

Where each pixel lies within one shard, shards compute final numbers, and merging puts them side by side. Where a pixel
is made of several shards, they compute states (sums, largest, means with squared deviations) that merge; a reducer that
has none is refused. Whoever merges needs no device: merge and finish are numpy.
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
    """How the same column of several shards becomes one."""

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
    """What a shard tells of each of its pixels."""

    source: Node | Histogram
    """One number for each pixel; of SPREAD the vector; or the histogram, which counts data."""
    merge: MergeOperation

    @property
    def columns(self) -> int:
        """How many numbers."""
        if isinstance(self.source, Histogram):
            return self.source.bins
        return 2 if self.merge is MergeOperation.SPREAD else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PixelGroup:
    """The pixels of a shard that have one width: they are computed together."""

    width: int
    starts: tuple[int, ...]
    """First column of each in the shard."""
    places: tuple[int, ...]
    """Place of each among the shard's pixels."""

    def index(self) -> npt.NDArray[np.intp]:
        """The columns of the shard that they are made of: [pixels, width]."""
        return np.asarray(self.starts, dtype=np.intp)[:, None] + np.arange(self.width, dtype=np.intp)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgram:
    """What one shard computes: from [..., width] to [..., pixels, columns]."""

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
    """A reducer made fit for a state of `width` numbers, cut into `pixels` and held by `shards`."""

    width: int
    pixels: int
    shards: int
    merged: bool
    """Pixels are made of several shards each; else each lies within one."""
    outputs: tuple[ShardOutput, ...]
    result: Node | None
    """Of merged results, where there is more to compute with them."""
    reductions: tuple[Reduction, ...]
    """What the merged outputs stand for, where there is a `result`."""

    @property
    def edges(self) -> tuple[int, ...]:
        """Of the pixels, in the unsharded vector: the same for every number of shards."""
        return cutting.pixel_edges(self.width, self.pixels)

    @property
    def columns(self) -> int:
        """What a shard tells of each of its pixels, in numbers."""
        return sum(output.columns for output in self.outputs)

    @property
    def values(self) -> int:
        """Final numbers for each pixel: 1, or the bins of a histogram."""
        return 1 if self.result is not None else self.columns

    @property
    def shard_bounds(self) -> tuple[int, ...]:
        """Of a plan that merges: the first shard of each pixel, and behind the last pixel the number of shards."""
        return tuple(edge // (self.width // self.shards) for edge in self.edges)

    def shard_pixels(self, shard: int) -> range:
        """The pixels that this shard holds, or holds a part of. Raises PlanError for one that there is not."""
        if not 0 <= shard < self.shards:
            raise ReductionPlanError(f"there is no shard {shard} among {self.shards}; write 0 to {self.shards - 1}")
        size = self.width // self.shards
        first, end = shard * size, (shard + 1) * size
        pairs = enumerate(itertools.pairwise(self.edges))
        inside = [index for index, (start, stop) in pairs if start < end and stop > first]
        return range(inside[0], inside[-1] + 1)

    def program(self, shard: int) -> ShardProgram:
        """What this shard computes. Raises PlanError for one that there is not."""
        held = self.shard_pixels(shard)
        size = self.width // self.shards
        first = shard * size
        spans = [(0, size)] if self.merged else [(self.edges[p] - first, self.edges[p + 1] - first) for p in held]
        return ShardProgram(width=size, pixels=len(held), groups=_groups(spans), outputs=self.outputs)

    def merge(self, parts: Sequence[Array]) -> Array:
        """What all shards computed, in their order, as [..., pixels, columns]. Raises PlanError."""
        if len(parts) != self.shards:
            raise ReductionPlanError(f"{len(parts)} parts of {self.shards} shards cannot be merged; wait for all")
        if not self.merged:
            return np.concatenate(parts, axis=-2)
        states = np.concatenate(parts, axis=-2).astype(np.float64)
        blocks = [states[..., first:end, :] for first, end in itertools.pairwise(self.shard_bounds)]
        return np.stack([self._merge_pixel(block) for block in blocks], axis=-2)

    def _merge_pixel(self, block: Array) -> Array:
        """One pixel: [..., shards, columns] -> [..., columns]."""
        ends = list(itertools.accumulate(output.columns for output in self.outputs))
        pieces = zip(self.outputs, [0, *ends], ends, strict=False)
        size = self.width // self.shards
        with np.errstate(all="ignore"):
            return np.concatenate([_merged(output.merge, block[..., a:b], size) for output, a, b in pieces], axis=-1)

    def finish(self, states: Array) -> Array:
        """Final numbers [..., pixels, values] of merged states, as 32-bit floats."""
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
        """Final numbers of what all shards computed. Raises PlanError."""
        return self.finish(self.merge(parts))


@functools.lru_cache(maxsize=256)
def compile_reduction_plan(reducer: Reducer, *, width: int, pixels: int, shards: int = 1) -> ReductionPlan:
    """The plan of a reducer. Raises PlanError for a cut, and ExpressionError for a filter, that cannot be so."""
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
    """What a program tells of the pixels of one group, [..., pixels, width], as columns to put side by side."""
    return [column for output in program.outputs for column in _columns(output, data, backend)]


def run(program: ShardProgram, shard: Array, *, dtype: npt.DTypeLike = np.float32) -> Array:
    """The reference: what a shard [..., width] tells, [..., pixels, columns], computed in `dtype`."""
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
    """The tree with merged results in the place of its reductions, which are added to those found."""
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
    """Over the shards, the last axis but one; each has `size` elements."""
    if merge is MergeOperation.SPREAD:
        return _merged_spread(block, size)
    found: Array = _OVER_SHARDS[merge].reduce(block, axis=-2)
    return found


def _merged_spread(block: Array, size: int) -> Array:
    """Chan, Golub and LeVeque 1979 for samples of equal size: no difference of large sums."""
    means, squares = block[..., 0], block[..., 1]
    mean = means.mean(axis=-1)
    between = size * np.square(means - mean[..., None]).sum(axis=-1)
    return np.stack([mean, squares.sum(axis=-1) + between], axis=-1)


def _finished(reduction: Reduction, last: Array, counts: Array) -> Array:
    """A merged reduction, of its last column."""
    match reduction:
        case Reduction.MEAN:
            return last / counts
        case Reduction.STD:
            found: Array = np.sqrt(last / counts)
            return found
        case _:
            return last
