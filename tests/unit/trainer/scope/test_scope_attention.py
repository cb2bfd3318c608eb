"""Attention computed again, against the formula in 64 bits; rows, strides and pixels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_common.filters.pixels import merges
from megatronapp_common.scope.protocol import MAX_MESSAGE_BYTES
from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.inference.step_plan import StepPlan
from megatronapp_trainer.scope.capture import attention_recompute
from megatronapp_trainer.scope.capture.attention_recompute import AttentionAtlas, AttentionRule, bucket
from megatronapp_trainer.scope.capture.capture_spec import capture_spec_of, residual_measures
from megatronapp_trainer.scope.capture.rank_shard import pixel_count
from megatronapp_trainer.scope.capture.tracked_requests import ModelSizes, RowStride, TrackedRequest, tracked_run
from megatronapp_trainer.scope.transfer.part_frames import TrackedRow, ranges

LAYERS, TOKENS, CHANNELS = 3, 37, 16


def drawn(heads: int, groups: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(heads + groups)
    query = torch.randn(LAYERS, TOKENS, heads, CHANNELS, generator=source) * 2
    keys = torch.randn(LAYERS, TOKENS, groups, CHANNELS, generator=source)
    return query.to(dtype), keys.to(dtype)


def written_out(query: torch.Tensor, keys: torch.Tensor, window: int | None, scale: float) -> torch.Tensor:
    """[L, H, Q, T] in 64 bits."""
    repeated = keys.double().repeat_interleave(query.size(2) // keys.size(2), dim=2)
    scores = torch.einsum("lqhd,lkhd->lhqk", query.double(), repeated) * scale
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    return scores.masked_fill((distance < 0) | (distance > (window or TOKENS)), float("-inf")).softmax(-1)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_formula(heads: int, groups: int, window: int | None, dtype: torch.dtype) -> None:
    query, keys = drawn(heads, groups, dtype)
    rule = AttentionRule(scale=0.25, window=window)
    positions = torch.arange(TOKENS)[None]
    found = attention_recompute.probabilities(query[:, None], keys[:, None], positions, rule)
    reference = written_out(query, keys, window, 0.25)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, 0].double(), reference, atol=1e-5, rtol=0)
    seen = (reference > 0).sum(-1)
    measures = attention_recompute.head_measures(found, positions, rule)
    entropy = torch.special.entr(reference).sum(-1) / seen.clamp(min=2).double().log()
    for name, expected in (("entropy", entropy), ("max", reference.amax(-1)), ("sink", reference[..., 0])):
        torch.testing.assert_close(measures[f"head.{name}"][:, 0].double(), expected.transpose(1, 2), atol=1e-5, rtol=0)


def test_sixteen_bits_are_within_a_hundredth_of_a_model_of_thirty_two() -> None:
    query, keys = drawn(4, 2)
    expected = written_out(query, keys, None, 0.25)
    found = attention_recompute.probabilities(
        query.bfloat16()[:, None],
        keys.bfloat16()[:, None],
        torch.arange(TOKENS)[None],
        AttentionRule(scale=0.25, window=None),
    )
    torch.testing.assert_close(found[:, 0].double(), expected, atol=1e-2, rtol=0)


@pytest.mark.parametrize("buffer", [1, 4 * TOKENS * 5, 1 << 24])
@pytest.mark.parametrize("chunk", [1, 10, TOKENS])
def test_pictures_are_the_same_in_any_chunks_and_blocks(
    buffer: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_recompute, "BUFFER_NUMBERS", buffer)
    query, keys = drawn(4, 2)
    rule = AttentionRule(scale=0.25, window=None)
    atlas = AttentionAtlas(LAYERS, 4, TOKENS, torch.device("cpu"))
    for start in range(0, TOKENS, chunk):
        end = min(TOKENS, start + chunk)
        atlas.add(query[:, start:end], keys[:, :end], start, rule)
    expected = written_out(query, keys, None, 0.25)
    edges = [index * TOKENS // 8 for index in range(9)]
    for y in range(8):
        for x in range(8):
            cell = expected[..., edges[y] : edges[y + 1], edges[x] : edges[x + 1]].amax(dim=(2, 3))
            torch.testing.assert_close(atlas.cells[:, :, y, x].double(), cell, atol=1e-5, rtol=0)


def test_a_long_prompt_needs_no_square_of_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    whole = attention_recompute.probabilities

    def watched(*given: torch.Tensor | AttentionRule) -> torch.Tensor:
        found = whole(*given)  # type: ignore[arg-type] # as it was called
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(attention_recompute, "BUFFER_NUMBERS", 1000)
    monkeypatch.setattr(attention_recompute, "probabilities", watched)
    query, keys = drawn(4, 2)
    AttentionAtlas(LAYERS, 4, TOKENS, torch.device("cpu")).add(query, keys, 0, AttentionRule(scale=1.0, window=None))
    assert max(sizes) <= 1000


def test_no_value_is_read_from_the_device() -> None:
    """Check with tensors of the meta device, which have no values: reading one fails."""
    meta = torch.device("meta")
    query, keys = (tensor.to(meta) for tensor in drawn(4, 2))
    positions, rule = torch.empty(1, TOKENS, dtype=torch.int64, device=meta), AttentionRule(scale=1.0, window=5)
    chances = attention_recompute.probabilities(query[:, None], keys[:, None], positions, rule)
    assert attention_recompute.head_measures(chances, positions, rule)["head.max"].shape == (LAYERS, 1, TOKENS, 4)
    AttentionAtlas(LAYERS, 4, TOKENS, meta).add(query, keys, 0, rule)
    residual_measures(query.flatten(2), query.flatten(2))


@given(st.integers(1, 5000), st.integers(64, 4096))
def test_buckets_hold_what_they_must(count: int, most: int) -> None:
    size = bucket(min(count, most), most)
    assert min(count, most) <= size <= most
    assert size == most or math.log2(size).is_integer()


@given(st.integers(1, 64), st.integers(1, 512), st.sampled_from([1, 2, 4, 6, 8]))
def test_pixels_fit_shards(width: int, expected: int, shards: int) -> None:
    count = pixel_count(width * shards, expected, shards)
    assert 1 <= count <= min(expected, width * shards)
    assert merges(width * shards, count, shards) == (count < shards)
    if expected % shards == 0 or shards % expected == 0:
        assert count == min(expected, width * shards)


def tracked_rows(run: TrackedRequest, plan: StepPlan) -> list[TrackedRow]:
    return run.rows(run.reads(plan.segments), decode=plan.decode)


@settings(max_examples=50)
@given(st.integers(1, 96), st.integers(1, 96), st.integers(1, 4096))
def test_overviews_fit_into_a_message(layers: int, heads: int, length: int) -> None:
    recipe = capture_spec_of(CaptureSettings())
    assert recipe is not None
    run = tracked_run("a", CaptureSettings(), (length,), ModelSizes(layers=layers, heads=heads))
    segment = Segment(slot=0, start=0, tokens=(0,) * length, request_id="a-0")
    rows = tracked_rows(run, StepPlan(segments=(segment,), outputs=(), decode=False))
    assert rows[0].position == 0
    assert rows[-1].position == length - 1
    row_bytes = layers * (3 * (32 + 4) + 2 * (64 + 4) + 6 + 3 * heads + 16)
    atlas = min(layers * heads * 64, MAX_MESSAGE_BYTES * 3 // 4)
    assert len(rows) <= 3 or len(rows) * row_bytes + atlas <= MAX_MESSAGE_BYTES


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 7))
def test_chunks_report_every_row_once(lengths: list[int], chunk: int) -> None:
    run = tracked_run("a", CaptureSettings(), lengths, ModelSizes(layers=2, heads=2))
    reported: list[tuple[int, int]] = []
    for sample, length in enumerate(lengths):
        for start in range(0, length, chunk):
            tokens = (0,) * min(chunk, length - start)
            segment = Segment(slot=sample, start=start, tokens=tokens, request_id=f"a-{sample}")
            plan = StepPlan(segments=(segment,), outputs=(), decode=False)
            assert not run.all_read
            reported += [(row.sample, row.position) for row in tracked_rows(run, plan)]
            run.advance(run.reads(plan.segments))
    assert run.all_read
    assert reported == [(sample, place) for sample, length in enumerate(lengths) for place in range(length)]
    decoding = [Segment(slot=s, start=length, tokens=(0,), request_id=f"a-{s}") for s, length in enumerate(lengths)]
    rows = tracked_rows(run, StepPlan(segments=tuple(decoding), outputs=(), decode=True))
    assert {run.step_of(row) for row in rows} == {1}
    assert not run.more(1, rows)


def test_strides_take_the_last_row() -> None:
    stride = RowStride(first=0, end=11, every=4, last=True)
    assert [place for place in range(12) if stride.includes(place)] == [0, 4, 8, 10]


def test_rows_that_follow_each_other_are_a_range() -> None:
    rows = [TrackedRow(token=0, sample=sample, position=place) for sample, place in ((0, 2), (0, 3), (0, 5), (1, 6))]
    assert ranges(rows) == [[0, 2, 2], [0, 5, 1], [1, 6, 1]]
    assert np.sum([span[2] for span in ranges(rows)]) == 4
