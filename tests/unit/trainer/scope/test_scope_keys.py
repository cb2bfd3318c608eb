"""Dependencies of a step's graph: the sites that are hooked, on every rank of a tensor group the same. Also what ranks
report of users' sites, which is the same in every layout."""

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.hooks.hook_collector import HookCollector, SiteValues
from megatronapp_trainer.hooks.sites import ShardAxis, forget_site, register_site
from megatronapp_trainer.scope.capture import reductions
from megatronapp_trainer.scope.capture.capture_spec import CaptureSpec, PixelReductions, capture_spec_of
from megatronapp_trainer.scope.capture.rank_shard import RankShard
from megatronapp_trainer.scope.capture.reductions import MOST_RECIPES, Reductions, active_sites

SHARD = RankShard(
    layers=(0, 2),
    heads=(0, 2),
    key_heads=(0, 2),
    mlp=(0, 32),
    num_layers=2,
    num_heads=4,
    num_key_heads=4,
    head_width=8,
    hidden=32,
    ffn=64,
    gated=True,
    vocabulary=99,
    max_length=64,
    positions="rotary",
    window=None,
    scale=1.0,
    tp=0,
    tensor_size=2,
    pp=0,
    pipeline_size=1,
)
SHARDS = (SHARD, dataclasses.replace(SHARD, heads=(2, 4), key_heads=(2, 4), mlp=(32, 64), tp=1))
STATES = ("qkv", "attention", "mlp1", "mlp2", "probabilities", "pca")


@st.composite
def captures(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "preset": draw(st.sampled_from(["default", "lite"])),
        "states": {name: draw(st.booleans()) for name in STATES},
        "pixels": {"qkv": draw(st.sampled_from([12, 24])), "mlp": draw(st.sampled_from([4, 16]))},
        "expression": {"qkv": draw(st.sampled_from(["data.mean(dim=-1)", "data.max()"]))},
        "rotary": draw(st.sampled_from(["before", "after"])),
        "pinned": draw(st.sampled_from([[], [{"layer": 0, "head": 1}]])),
    }


def recipe(capture: dict[str, Any]) -> CaptureSpec:
    pinned: dict[str, Any] = {"pinned": []} if capture.get("preset") == "lite" else {}
    found = capture_spec_of(CaptureSettings.model_validate(capture | pinned))
    assert found is not None
    return found


def reductions_of(shard: RankShard) -> Reductions:
    return Reductions(HookCollector(torch.nn.Module()), shard, torch.zeros(2, 4, 65, 2, 8))


@given(captures())
def test_a_key_names_what_the_ranks_hook(capture: dict[str, Any]) -> None:
    register_site("normed", "input_layernorm", reducers=("mean",))
    try:
        found = recipe(capture)
        names = [set(reductions_of(shard).sites(found)) for shard in SHARDS]
    finally:
        forget_site("normed")
    assert {site.name for site in active_sites(found)} == names[0] | names[1]


@given(captures(), captures())
def test_only_sites_change_a_key(first: dict[str, Any], second: dict[str, Any]) -> None:
    sites = ("preset", "states", "rotary")
    alike = recipe(first | {name: second[name] for name in set(first) - set(sites)})
    assert active_sites(recipe(first)) == active_sites(alike)
    states = first["states"] | {"mlp2": not first["states"]["mlp2"]}
    assert active_sites(recipe(first)) != active_sites(recipe(first | {"states": states}))


def test_the_least_recently_used_filters_are_dropped_before_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    living, alive = weakref.WeakSet[PixelReductions](), list[int]()

    class Counted(PixelReductions):
        def __init__(self, *arguments: Any) -> None:
            living.add(self)
            alive.append(len(living))
            super().__init__(*arguments)

    monkeypatch.setattr(reductions, "PixelReductions", Counted)
    made = reductions_of(SHARD)
    recipes = [
        recipe({"pixels": {"mlp": 4, "qkv": 12}, "expression": {"qkv": f"data.mean() + {number}"}})
        for number in range(MOST_RECIPES + 2)
    ]
    for each in (*recipes[:MOST_RECIPES], recipes[0], *recipes[MOST_RECIPES:], recipes[0]):
        made.pixels_of(each)
    assert alive == [*range(1, MOST_RECIPES + 1), MOST_RECIPES, MOST_RECIPES]


def seen(shard: RankShard, width: int, *, gated: bool) -> HookCollector:
    """A layer's numbers, 0, 1, 2, .., as far as this rank has them; of gated ones a part of each half."""
    whole = torch.arange(float(width * shard.tensor_size)).expand(3, -1)
    halves = whole.chunk(2, dim=-1) if gated else (whole,)
    mine = torch.cat([half.chunk(shard.tensor_size, dim=-1)[shard.tp] for half in halves], dim=-1)
    found = HookCollector(torch.nn.Module())
    found.put({"own": SiteValues(values={0: mine})})
    return found


def own_pixels(shard: RankShard, width: int, *, gated: bool = False, **how: Any) -> dict[tuple[int, ...], torch.Tensor]:
    """Return what a rank reports of a registered site, by the span in its header."""
    register_site("own", "mlp", **how)
    try:
        found = PixelReductions(recipe({"states": dict.fromkeys(STATES, False)}), shard, torch.device("cpu"))
        own = [tensor for tensor in found.compute(seen(shard, width, gated=gated)) if tensor.name == "own"]
        return {tuple(tensor.header["features"]): tensor.values[0] for tensor in own}
    finally:
        forget_site("own")


@pytest.mark.parametrize("reducer", ["mean", "data.max()", "histogram(4, 0, 128)"])
@pytest.mark.parametrize("axis", [ShardAxis.FEATURES, ShardAxis.HEADS, ShardAxis.MLP])
def test_shards_of_a_plugin_site_concatenate_to_the_whole(axis: ShardAxis, reducer: str) -> None:
    how: dict[str, Any] = {"axis": axis, "reducers": (reducer,), "pixels": 8}
    alone = dataclasses.replace(SHARD, heads=(0, 4), key_heads=(0, 4), mlp=(0, 64), tensor_size=1)
    gated = axis is ShardAxis.MLP
    (whole,) = own_pixels(alone, 128, **how).values()
    parts = {span: values for shard in SHARDS for span, values in own_pixels(shard, 64, gated=gated, **how).items()}
    assert [span[0] for span in sorted(parts)] == ([0, 32, 64, 96] if gated else [0, 64])
    assert torch.equal(torch.cat([parts[span] for span in sorted(parts)], dim=-1), whole)


def test_compiled_filters_are_cached_for_a_few_recipes() -> None:
    found = reductions_of(SHARD)
    many = [recipe({"expression": {"qkv": f"data.mean() + {number}"}}) for number in range(12)]
    cached = [found.pixels_of(spec) for spec in many]
    assert [found.pixels_of(spec) is known for spec, known in zip(many[-8:], cached[-8:], strict=True)] == [True] * 8
    assert found.pixels_of(many[0]) is not cached[0]
