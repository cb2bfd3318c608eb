"""Specification of what a capture computes on a rank in each step: sites, and tensors made of them.

Equal recipes give equal kernels, so that a decode step of one recipe is one CUDA graph. L layers of this rank, N rows.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from megatronapp_common.errors import FilterError, ReductionPlanError
from megatronapp_common.filters.reducers import parse_reducer
from megatronapp_common.filters.shard import Shard
from megatronapp_common.filters.shard_plan import ReductionPlan, compile_reduction_plan
from megatronapp_common.scope.protocol_requests import CaptureSettings, Rotary
from megatronapp_trainer.hooks.hook_collector import HookCollector
from megatronapp_trainer.hooks.sites import STAGE_INPUT, ShardAxis, Site, registered, site_of
from megatronapp_trainer.scope.capture.device_program import DeviceProgram
from megatronapp_trainer.scope.capture.rank_shard import RankShard, Span, pixel_count
from megatronapp_trainer.scope.transfer.device_copy import NamedTensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """A capture as far as it changes what is computed."""

    qkv: int
    """Pixels of each of q, k and v; 0: none of them."""
    mlp: int
    mlp1: bool
    mlp2: bool
    attention: bool
    pca: bool
    rotary: Rotary
    qkv_filter: str
    mlp_filter: str
    own: tuple[Site, ...]
    """Registered sites that have reducers."""


def capture_spec_of(capture: CaptureSettings) -> CaptureSpec | None:
    """Return the specification of a capture; None if it captures nothing of the model."""
    if capture.preset == "off":
        return None
    states = capture.states
    return CaptureSpec(
        qkv=capture.pixels.qkv // 3 if states.qkv else 0,
        mlp=capture.pixels.mlp,
        mlp1=states.mlp1 and capture.preset == "default",
        mlp2=states.mlp2,
        attention=states.attention,
        pca=states.pca,
        rotary=capture.rotary,
        qkv_filter=capture.expression.qkv,
        mlp_filter=capture.expression.mlp,
        own=tuple(site for site in registered() if site.reducers),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _VectorRange:
    """Range of a rank's vector in that of the whole model."""

    width: int
    """Width of the whole vector."""
    shards: int = 1
    shard: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ShardFilter:
    """A vector filter, ready to run on one shard."""

    program: DeviceProgram
    header: dict[str, Any]
    """`merge`, if the numbers are states that the hub merges."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _PixelReduction:
    """One tensor of pixels: a part of the width that a site gives."""

    name: str
    site: Site
    part: slice
    filter: _ShardFilter
    key: str
    span: Span


class PixelReductions:
    """The vector filters of a recipe, made for one rank's shard.

    Raises ReductionPlanError or FilterError if they do not fit it.
    """

    def __init__(self, recipe: CaptureSpec, shard: RankShard, device: torch.device) -> None:
        self._shard = shard
        self._device = device
        self._reductions = [*self._built_in(recipe)]
        self._own = recipe.own
        self._own_filters: dict[tuple[str, int, int], tuple[_ShardFilter, Span]] = {}
        for site in recipe.own:
            self._check_own(site)

    @property
    def sites(self) -> dict[str, Site]:
        """Sites that the filters read."""
        return {reduction.site.name: reduction.site for reduction in self._reductions} | {
            site.name: site for site in self._own
        }

    def compute(self, seen: HookCollector) -> Iterator[NamedTensor]:
        """All tensors of pixels, [layers, rows, pixels]; or, with `merge` said of them, of states of this shard."""
        stacks: dict[str, torch.Tensor] = {}
        for reduction in self._reductions:
            if reduction.span[0] == reduction.span[1] or not (layers := seen.layers(reduction.site.name)):
                continue
            if reduction.site.name not in stacks:
                stacks[reduction.site.name] = seen.stacked(reduction.site.name).flatten(2)
            vectors = stacks[reduction.site.name][..., reduction.part]
            yield self._found(reduction, _run(reduction.filter.program, vectors), tuple(layers))
        for site in self._own:
            yield from self._of_own(site, seen)

    def _found(self, reduction: _PixelReduction, values: torch.Tensor, layers: tuple[int, ...]) -> NamedTensor:
        header = {"site": reduction.name, "replicated": reduction.key == ""} | (
            {reduction.key: list(reduction.span)} if reduction.key else {}
        )
        return NamedTensor(name=reduction.name, values=values, layers=layers, header=header | reduction.filter.header)

    def _built_in(self, recipe: CaptureSpec) -> Iterator[_PixelReduction]:
        shard = self._shard
        if recipe.qkv:
            yield from self._qkv(recipe)
        filters = (recipe.mlp, recipe.mlp_filter)
        if recipe.mlp1:
            yield from self._fc1(filters)
        if recipe.mlp2 and shard.is_first_of_tensor:
            found = self._filter(filters, _VectorRange(width=shard.hidden))
            span = (0, shard.hidden)
            yield _PixelReduction(name="mlp2", site=site_of("mlp2"), part=slice(None), filter=found, key="", span=span)

    def _qkv(self, recipe: CaptureSpec) -> Iterator[_PixelReduction]:
        shard = self._shard
        query = _VectorRange(width=shard.num_heads * shard.head_width, shards=shard.tensor_size, shard=shard.tp)
        key = _VectorRange(width=shard.num_key_heads * shard.head_width, shards=shard.key_shards, shard=shard.key_shard)
        for name, vector_range, span in (
            ("q", query, shard.heads),
            ("k", key, shard.key_heads),
            ("v", key, shard.key_heads),
        ):
            try:
                found = self._filter((recipe.qkv, recipe.qkv_filter), vector_range)
            except FilterError as error:
                if recipe.qkv >= vector_range.shards:
                    raise
                sentence = f"{error.sentence} (pixels of {name} alone: pixels.qkv counts q, k and v together)"
                raise FilterError(error.column, sentence) from error
            site = site_of(name, rotary=recipe.rotary)
            yield _PixelReduction(name=name, site=site, part=slice(None), filter=found, key="heads", span=span)

    def _fc1(self, filters: tuple[int, str]) -> Iterator[_PixelReduction]:
        """A rank of a gated MLP has a part of all gates and a part of all that they let through, side by side.

        No pixel is made of both.
        """
        (pixels, text), shard, halves = filters, self._shard, 2 if self._shard.gated else 1
        width = shard.mlp[1] - shard.mlp[0]
        for half in range(halves):
            index = half * shard.tensor_size + shard.tp
            vector_range = _VectorRange(width=halves * shard.ffn, shards=halves * shard.tensor_size, shard=index)
            span = (half * shard.ffn + shard.mlp[0], half * shard.ffn + shard.mlp[1])
            part = slice(half * width, (half + 1) * width)
            found = self._filter((max(pixels, halves), text), vector_range)
            yield _PixelReduction(name="mlp1", site=site_of("mlp1"), part=part, filter=found, key="features", span=span)

    def _filter(self, filters: tuple[int, str], vector_range: _VectorRange) -> _ShardFilter:
        """`filters`: how many pixels are wanted, and the text of a reducer."""
        pixels, text = filters
        plan = _plan(pixels, text, vector_range)
        program = DeviceProgram(plan.program(vector_range.shard), self._device)
        if not plan.merged:
            return _ShardFilter(program=program, header={})
        reducer = " ".join(text.split())
        shard = Shard(
            reducer=reducer,
            width=vector_range.width,
            pixels=plan.pixels,
            shards=vector_range.shards,
            shard=vector_range.shard,
        )
        return _ShardFilter(program=program, header=shard.dump())

    def _of_own(self, site: Site, seen: HookCollector) -> Iterator[NamedTensor]:
        """A registered site: how wide it is, is known when it has been seen."""
        if not (layers := seen.layers(site.name)) or (
            site.axis is ShardAxis.WHOLE and not self._shard.is_first_of_tensor
        ):
            return
        parts = self._parts(site.axis, seen.stacked(site.name).flatten(2))
        for (place, name), (part, values) in itertools.product(enumerate(_own_names(site)), enumerate(parts)):
            own, span = self._own_filter(site, place, (part, len(parts)), values.size(-1))
            out = _run(own.program, values)
            header = {"site": site.name, "replicated": site.axis is ShardAxis.WHOLE} | own.header
            header |= {} if site.axis is ShardAxis.WHOLE else {"features": list(span)}
            found, of = (out, tuple(layers)) if site.per_layer else (out[0], None)
            yield NamedTensor(name=name, values=found, layers=of, header=header)

    def _own_filter(self, site: Site, place: int, of: tuple[int, int], width: int) -> tuple[_ShardFilter, Span]:
        """`of`: which part of how many, of a width that each rank has."""
        (part, parts), (shards, shard) = of, self._shards(site.axis)
        if (site.name, place, part) not in self._own_filters:
            count, index = parts * shards, part * shards + shard
            vector_range = _VectorRange(width=width * count, shards=count, shard=index)
            found = self._filter((site.pixels, site.reducers[place]), vector_range)
            self._own_filters[site.name, place, part] = found, (width * index, width * (index + 1))
        return self._own_filters[site.name, place, part]

    def _parts(self, axis: ShardAxis, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split the values of a gated MLP: each rank has a part of all gates and a part of the gated values."""
        width = self._shard.mlp[1] - self._shard.mlp[0]
        is_halved = axis is ShardAxis.MLP and self._shard.tensor_size > 1 and values.size(-1) == 2 * width
        return torch.split(values, width, dim=-1) if is_halved else (values,)

    def _shards(self, axis: ShardAxis) -> tuple[int, int]:
        shard = self._shard
        if axis is ShardAxis.WHOLE:
            return 1, 0
        return (shard.key_shards, shard.key_shard) if axis is ShardAxis.KEY_HEADS else (shard.tensor_size, shard.tp)

    def _check_own(self, site: Site) -> None:
        """Raise ReductionPlanError if a pixel would need several ranks and a reducer does not merge.

        The width of the site, which is not known yet, does not matter.
        """
        shards, _ = self._shards(site.axis)
        shards *= 2 if site.axis is ShardAxis.MLP and self._shard.gated and shards > 1 else 1
        if site.pixels >= shards:
            return
        for text in site.reducers:
            try:
                _plan(site.pixels, text, _VectorRange(width=shards, shards=shards))
            except FilterError as error:
                raise ReductionPlanError(
                    f"site {site.name}, reducer {text!r}: {error} (`pixels` of register_site)"
                ) from error


def check_capture(capture: CaptureSettings, shard: RankShard) -> None:
    """Raise ReductionPlanError or ExpressionError if a run with this capture would. From any thread."""
    if (recipe := capture_spec_of(capture)) is not None:
        _check_spec(recipe, shard)


@functools.lru_cache(maxsize=8)
def _check_spec(recipe: CaptureSpec, shard: RankShard) -> None:
    PixelReductions(recipe, shard, torch.device("cpu"))


def _plan(pixels: int, text: str, vector_range: _VectorRange) -> ReductionPlan:
    """Plan as many pixels as fit, `pixels` at most."""
    count = pixel_count(vector_range.width, pixels, vector_range.shards)
    return compile_reduction_plan(
        parse_reducer(text), width=vector_range.width, pixels=count, shards=vector_range.shards
    )


def _run(program: DeviceProgram, vectors: torch.Tensor) -> torch.Tensor:
    """[layers, rows, pixels x columns] of vectors [layers, rows, width]."""
    out = program.buffer(*vectors.shape[:-1])
    program.run(vectors, out)
    return out.flatten(2)


def _own_names(site: Site) -> list[str]:
    """Name the tensors of a registered site, one for each reducer: `site.word`, the second of a word `site.word#2`."""
    if len(site.reducers) == 1:
        return [site.name]
    names = [text.split("(")[0].strip() for text in site.reducers]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [f"{site.name}.{name}{f'#{count}' if count > 1 else ''}" for name, count in zip(names, counts, strict=True)]


def residual_measures(before_LNH: torch.Tensor, after_LNH: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measure each layer and row, [L, N], in fp32: norm after it, norm of its change over the norm before, cosine."""
    before, after = before_LNH.float(), after_LNH.float()
    norm_before, norm_after = before.norm(dim=-1), after.norm(dim=-1)
    change = (after - before).norm(dim=-1) / norm_before
    cosine = (after * before).sum(-1) / (norm_after * norm_before)
    return {"residual.norm": norm_after, "residual.change": change, "residual.cosine": cosine}


def residual_sites() -> dict[str, Site]:
    """Return the sites that residual measures read."""
    return {"residual": site_of("residual"), STAGE_INPUT.name: STAGE_INPUT}
