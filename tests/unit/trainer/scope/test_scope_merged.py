"""Pixels that are spread over several tensor ranks: the reports of ranks, merged by the hub, equal those of one
rank."""

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.scope.parts.merge import MergedTensor, ShardTensor, merge, shard_tensors_of
from megatronapp_common.errors import FilterError, ReductionPlanError
from megatronapp_common.filters.reducers import parse_reducer
from megatronapp_common.filters.shard_plan import compile_reduction_plan, run
from megatronapp_common.frames import FrameType, decode, encode
from megatronapp_common.scope.protocol import Tensor, build_frame
from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.hooks.hook_collector import HookCollector, SiteValues
from megatronapp_trainer.hooks.sites import ShardAxis, forget_site, register_site
from megatronapp_trainer.scope.capture.capture_spec import CaptureSpec, PixelReductions, capture_spec_of
from megatronapp_trainer.scope.capture.rank_shard import RankShard

HEADS, WIDTH, FFN, ROWS, LAYERS = 8, 4, 32, 3, (2, 5)
ALONE = RankShard(
    layers=(0, 8),
    heads=(0, HEADS),
    key_heads=(0, HEADS),
    mlp=(0, FFN),
    num_layers=8,
    num_heads=HEADS,
    num_key_heads=HEADS,
    head_width=WIDTH,
    hidden=HEADS * WIDTH,
    ffn=FFN,
    gated=False,
    vocabulary=99,
    max_length=64,
    positions="rotary",
    window=None,
    scale=1.0,
    tp=0,
    tensor_size=1,
    pp=0,
    pipeline_size=1,
)
MERGING = [
    "mean",
    "max",
    "std",
    "rms",
    "min",
    "absmax",
    "data.abs().max() / data.square().mean()",
    "where(data.mean() > 0, data.max(), 1)",
    "histogram(4, -2, 2)",
]
Truth = dict[str, np.ndarray]


def shards_of(size: int, key_heads: int, *, gated: bool) -> list[RankShard]:
    whole = dataclasses.replace(ALONE, num_key_heads=key_heads, tensor_size=size, gated=gated)
    found = []
    for tp in range(size):
        first = tp * key_heads // size
        found.append(
            dataclasses.replace(
                whole,
                tp=tp,
                heads=(tp * HEADS // size, (tp + 1) * HEADS // size),
                key_heads=(first, max(first + 1, (tp + 1) * key_heads // size)),
                mlp=(tp * FFN // size, (tp + 1) * FFN // size),
            )
        )
    return found


def truth_of(key_heads: int, *, gated: bool) -> Truth:
    """Whole vectors, [rows, layers, width]."""
    source = np.random.default_rng(7)
    widths = {"q": HEADS * WIDTH, "k": key_heads * WIDTH, "v": key_heads * WIDTH, "mlp1": FFN * (1 + gated), "own": 16}
    return {name: source.normal(0.3, 1, (ROWS, len(LAYERS), width)).astype("<f4") for name, width in widths.items()}


def seen(shard: RankShard, truth: Truth) -> HookCollector:
    """Return what the hooks of a rank store of it."""

    def site_values(values: np.ndarray) -> SiteValues:
        return SiteValues(values={layer: torch.from_numpy(values[:, place]) for place, layer in enumerate(LAYERS)})

    halves = np.split(truth["mlp1"], 1 + shard.gated, axis=-1)
    keys = slice(shard.key_heads[0] * WIDTH, shard.key_heads[1] * WIDTH)
    mine = {
        "q": truth["q"][..., shard.heads[0] * WIDTH : shard.heads[1] * WIDTH],
        "k": truth["k"][..., keys],
        "v": truth["v"][..., keys],
        "mlp1": np.concatenate([half[..., slice(*shard.mlp)] for half in halves], axis=-1),
        "own": np.split(truth["own"], shard.tensor_size, axis=-1)[shard.tp],
    }
    found = HookCollector(torch.nn.Module())
    found.put({name: site_values(np.ascontiguousarray(values)) for name, values in mine.items()})
    return found


def recipe(qkv: int, mlp: int, reducer: str) -> CaptureSpec:
    capture = {
        "states": {"mlp2": False},
        "pixels": {"qkv": 3 * qkv, "mlp": mlp},
        "expression": {"qkv": reducer, "mlp": reducer},
    }
    found = capture_spec_of(CaptureSettings.model_validate(capture))
    assert found is not None
    return found


def captured(spec: CaptureSpec, ranks: list[RankShard], truth: Truth) -> dict[str, list[ShardTensor]]:
    """Return what the hub reads of the frames of all ranks, by name."""
    named: dict[str, list[ShardTensor]] = defaultdict(list)
    for shard in ranks:
        tensors = []
        for tensor in PixelReductions(spec, shard, torch.device("cpu")).compute(seen(shard, truth)):
            values = tensor.rows_first().contiguous().numpy()
            tensors.append(Tensor(tensor.name, "f32", values, None, {"layers": list(LAYERS), **tensor.header}))
        frame = build_frame(FrameType.SCOPE_PART, {"rows": [[0, 4, ROWS]]}, tensors)
        for shard_tensor in shard_tensors_of(decode(encode(frame)), shard.tp):
            named[shard_tensor.tensor.name].append(shard_tensor)
    return named


def check(table: MergedTensor, whole: np.ndarray, reducer: str, pixels: int) -> None:
    """Check against what one rank computes, with this number of pixels."""
    plan = compile_reduction_plan(parse_reducer(reducer), width=whole.shape[-1], pixels=pixels)
    expected = plan.combine([run(plan.program(0), whole)]).reshape(*whole.shape[:-1], -1)
    assert (table.rows, table.layers) == (((0, 4), (0, 5), (0, 6)), LAYERS)
    assert table.data.shape == expected.shape and table.data.dtype == np.float32
    np.testing.assert_allclose(table.data, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans()),
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    st.sampled_from(MERGING),
    st.randoms(use_true_random=False),
)
def test_any_layout_captures_the_same_as_a_single_rank(
    layout: tuple[int, int, bool], counts: tuple[int, int], reducer: str, order: Any
) -> None:
    size, key_heads, gated = layout
    truth, spec = truth_of(key_heads, gated=gated), recipe(*counts, reducer)
    found = captured(spec, shards_of(size, key_heads, gated=gated), truth)
    qkv, mlp = min(counts[0], key_heads * WIDTH), max(counts[1], 1 + gated)
    for name, pixels in (("q", counts[0]), ("k", qkv), ("v", qkv), ("mlp1", mlp)):
        shards = {"q": size, "mlp1": size * (1 + gated)}.get(name, min(size, key_heads))
        assert [shard_tensor.shard is not None for shard_tensor in found[name]] == [pixels < shards] * len(found[name])
        order.shuffle(found[name])
        check(merge(found[name]), truth[name], reducer, pixels)


@pytest.mark.parametrize("reducer", ["mean", "std", "histogram(4, -2, 2)"])
@pytest.mark.parametrize(("pixels", "count"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_plugin_sites_are_merged_too(reducer: str, pixels: int, count: int) -> None:
    truth = truth_of(4, gated=False)
    register_site("own", "mlp", axis=ShardAxis.FEATURES, reducers=(reducer,), pixels=pixels)
    try:
        found = captured(recipe(8, 8, "mean"), shards_of(4, 4, gated=False), truth)
    finally:
        forget_site("own")
    check(merge(found["own"]), truth["own"], reducer, count)


def test_reducers_of_a_site_have_names_of_their_own() -> None:
    truth, texts = truth_of(8, gated=False), ["data.max() - data.min()", "data.max()", "mean", "data.max() * 2"]
    register_site("own", "mlp", axis=ShardAxis.FEATURES, reducers=texts, pixels=1)
    try:
        found = captured(recipe(8, 8, "mean"), shards_of(2, 8, gated=False), truth)
    finally:
        forget_site("own")
    names = dict(zip(["own.data.max", "own.data.max#2", "own.mean", "own.data.max#3"], texts, strict=True))
    assert {name for name in found if name.startswith("own")} == set(names)
    for name, text in names.items():
        check(merge(found[name]), truth["own"], text, 1)


NOT_MERGING = ["data[:2].mean()", "(data - data.mean()).abs().max()", "data[0]"]


@pytest.mark.parametrize("reducer", NOT_MERGING)
def test_what_does_not_merge_is_refused_before_anything_happens(reducer: str) -> None:
    first, device = shards_of(2, 4, gated=True)[0], torch.device("cpu")
    with pytest.raises(FilterError, match=r"several of 2 shards; ask for 2 pixels.*pixels of q alone"):
        PixelReductions(recipe(1, 8, reducer), first, device)
    with pytest.raises(FilterError, match="several of 4 shards; ask for 4 pixels"):
        PixelReductions(recipe(2, 3, reducer), first, device)
    PixelReductions(recipe(2, 4, reducer), first, device)
    PixelReductions(recipe(1, 1, reducer), shards_of(1, 4, gated=False)[0], device)


@pytest.mark.parametrize(
    ("axis", "least"),
    [(ShardAxis.FEATURES, 2), (ShardAxis.HEADS, 2), (ShardAxis.KEY_HEADS, 2), (ShardAxis.MLP, 4), (ShardAxis.WHOLE, 1)],
)
def test_what_does_not_merge_of_a_site_is_refused_too(axis: ShardAxis, least: int) -> None:
    first, device = shards_of(2, 4, gated=True)[0], torch.device("cpu")
    try:
        for pixels in (least, least - 1):
            forget_site("own")
            register_site("own", "mlp", axis=axis, reducers=("mean", "data[0]"), pixels=pixels)
            if pixels in {0, least}:
                PixelReductions(recipe(2, 4, "mean"), first, device)
                continue
            message = rf"site own, reducer 'data\[0\]': column 6.*ask for {least} pixels.*of register_site"
            with pytest.raises(ReductionPlanError, match=message):
                PixelReductions(recipe(2, 4, "mean"), first, device)
    finally:
        forget_site("own")


def test_a_shard_that_is_missing_leaves_its_pixels_open() -> None:
    truth = truth_of(2, gated=False)
    found = captured(recipe(2, 8, "where(data.mean() > -9, 1, 0)"), shards_of(4, 2, gated=False), truth)
    table = merge([shard_tensor for shard_tensor in found["q"] if shard_tensor.tp != 1])
    assert np.isnan(table.data[..., 0]).all() and (table.data[..., 1] == 1).all()
    assert not np.isnan(merge([shard_tensor for shard_tensor in found["k"] if shard_tensor.tp in {0, 2}]).data).any()
    later = dataclasses.replace(found["q"][1], rows=tuple((0, 5 + place) for place in range(ROWS)))
    table = merge([later, *(shard_tensor for shard_tensor in found["q"] if shard_tensor.tp != 1)])
    assert [np.isnan(table.data[place, :, 0]).all() for place in range(4)] == [True, False, False, True]
    assert np.isnan(table.data[3]).all()
