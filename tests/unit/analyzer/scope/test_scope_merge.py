"""Parts of any layout, in any order, make the same step."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import scope_session
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.ingest.events import IgnoredEvents
from megatronapp_analyzer.scope.parts import shard_merge as merging
from megatronapp_analyzer.scope.parts.merge import merge, merge_all, rows_of, shard_tensors_of
from megatronapp_analyzer.scope.parts.part_tracker import PartHeader
from megatronapp_analyzer.scope.parts.step_assembler import TOKENS_WAIT_S, WAIT_S, ScopeStepAssembler
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_common import frames
from megatronapp_common.filters.shard_plan import ReductionPlan
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.codes import TensorCode, decode
from megatronapp_common.scope.protocol import Tensor, build_frame, unpack

LAYOUTS = [(1, 1, False), (2, 1, False), (1, 2, False), (4, 1, True), (2, 2, True), (4, 4, False)]


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=3)


def shown(core: ScopeCore) -> list[bytes]:
    run = core.runs[scope_session.RUN]
    return [entry.whole for entry in run.journal.after(0) if entry.whole and entry.type != FrameType.SCOPE_RUN]


@functools.cache
def published(tp: int = 1, pp: int = 1, parallel: bool = False) -> list[tuple[int, Frame]]:
    return list(scope_session.rank_frames(recording(), tp=tp, pp=pp, sequence_parallel=parallel))


@functools.cache
def reference() -> list[tuple[int, dict[str, Any], bytes]]:
    return [unnumbered(frame) for frame in shown(fed(published()))]


class Introduced(IgnoredEvents):
    def basis_unknown(self, run: ScopeRun) -> None:
        run.pca_version = scope_session.VERSION


def fed(frames_: list[tuple[int, Frame]], clock: Any = lambda: 0.0) -> ScopeCore:
    core = ScopeCore(ScopeSettings(job="tiny"), clock=clock, events=Introduced())
    core.pca.newest = scope_session.VERSION
    for rank, frame in frames_:
        core.ingest.take_frame(0, rank, frame)
    return core


@settings(max_examples=12, deadline=None)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_any_layout_and_any_order_of_ranks_give_the_same_frames(
    data: st.DataObject, layout: tuple[int, int, bool]
) -> None:
    tp, pp, parallel = layout
    sent = published(tp, pp, parallel)
    first = {FrameType.SCOPE_PUBLISHER, FrameType.SCOPE_RUN_STATE}
    ready = [rank_frame for rank_frame in sent if rank_frame[1].type in first]
    rest = [rank_frame for rank_frame in sent if rank_frame[1].type not in first]
    order = data.draw(st.permutations([rank for rank, _ in rest]))
    queues = {rank: iter([rank_frame for rank_frame in rest if rank_frame[0] == rank]) for rank in set(order)}
    core = fed(ready + [next(queues[rank]) for rank in order])
    assert core.ingest.rejected.count == 0
    assert [unnumbered(frame) for frame in shown(core)] == reference()


def unnumbered(data: bytes) -> tuple[int, dict[str, Any], bytes]:
    frame = frames.decode(data)
    return frame.type, {key: value for key, value in frame.header.items() if key != "seq"}, bytes(frame.body)


def test_what_is_shown_is_what_the_model_computed() -> None:
    run = recording()
    steps = [Frame(*fields) for fields in reference() if fields[0] == FrameType.SCOPE_STEP]
    assert [frame.header["step"] for frame in steps] == [0, 1, 2]
    for frame in steps:
        found = {tensor.name: tensor for tensor in unpack(frame)}
        for index, (sample, position) in enumerate(frame.header["rows"]):
            expected = scope_session.tables(run, sample)
            for name in expected.keys() & found.keys():
                close(found[name], index, expected[name][position])
            logits = run.sites[sample]["logits"][position]
            assert found["top.id"].data[index, 0] == logits.argmax()
            assert frame.header["topTexts"][index][0] == (scope_session.text_of(int(logits.argmax())) or "�")
    assert "pca" in found and found["mlp1"].code == "i8"


def close(tensor: Tensor, index: int, expected: Any) -> None:
    scales = None if tensor.scales is None else tensor.scales[index]
    worst = {"i8": 0 if scales is None else scales.max() / 2, "u8": 0.002, "f16": 0.002 * np.abs(expected).max()}
    got = decode(TensorCode(tensor.code), tensor.data[index], scales)
    np.testing.assert_allclose(got, expected, atol=float(worst[tensor.code]) * 1.01, rtol=0)


def test_a_step_closed_without_late_ranks_lists_them() -> None:
    now = [0.0]
    sent = list(scope_session.rank_frames(recording(), pp=2))
    late = [rank_frame for rank_frame in sent if rank_frame[0] == 1 and rank_frame[1].type == FrameType.SCOPE_PART]
    on_time = [rank_frame for rank_frame in sent if rank_frame[0] != 1 or rank_frame[1].type != FrameType.SCOPE_PART]
    core = fed(on_time, clock=lambda: now[0])
    run = core.runs[scope_session.RUN]
    assert not any(entry.type == FrameType.SCOPE_STEP for entry in run.journal.after(0))
    now[0] = WAIT_S
    core.ingest.close_due()
    journal = [frames.decode(entry.whole or b"") for entry in run.journal.after(0)]
    gaps = [frame.header for frame in journal if frame.type == FrameType.SCOPE_GAP]
    assert [(gap["what"], gap["ranks"], gap["reason"], gap["from"]) for gap in gaps] == [
        ("ranks", [1], "late", step) for step in range(3)
    ]
    steps = [frame for frame in journal if frame.type == FrameType.SCOPE_STEP]
    norms = {tensor.name: tensor.data for tensor in unpack(steps[1])}["residual.norm"]
    assert np.isfinite(norms[:, :2]).all() and np.isnan(norms[:, 2:]).all()
    before = len(run.journal)
    for rank, frame in late:
        core.ingest.take_frame(0, rank, frame)
    assert len(run.journal) == before


def test_no_step_overtakes_an_earlier_step_that_may_still_arrive() -> None:
    assembler = ScopeStepAssembler()
    tokens = Frame(FrameType.SCOPE_TOKENS, {})
    assembler.add_tokens(("run", 1), tokens, 0.0)
    assembler.add_part(("run", 1), [], 0.0, PartHeader(0, more=False))
    assert assembler.close([0], 0.1) == []
    assembler.add_tokens(("run", 0), tokens, 0.1)
    assembler.add_part(("run", 0), [], 0.1, PartHeader(0, more=True))
    assert assembler.close([0], 0.15) == []
    assembler.add_part(("run", 0), [], 0.15, PartHeader(0, more=False))
    assert [step.step for step in assembler.close([0], 0.15)] == [0, 1]
    assert len(assembler) == 0 and assembler.due_s() is None


def test_steps_that_never_get_tokens_do_not_fill_memory() -> None:
    assembler = ScopeStepAssembler()
    for step in range(500):
        assembler.add_part(("run", step), [], step * 1e-3, PartHeader(0, more=False))
        assembler.close([0], step * 1e-3)
    assert len(assembler) <= 64


def test_a_step_is_closed_even_if_its_tokens_never_arrive() -> None:
    assembler = ScopeStepAssembler()
    assembler.add_part(("run", 0), [], 0.0, PartHeader(0))
    assert assembler.close([0], 1.0) == [] and assembler.due_s() == TOKENS_WAIT_S
    (closed,) = assembler.close([0], TOKENS_WAIT_S)
    assert (closed.step, closed.tokens) == (0, None)
    assert len(assembler) == 0 and assembler.due_s() is None
    assembler.add_part(("run", 1), [], 100.0, PartHeader(0))
    assembler.end("run")
    assert assembler.due_s() == 100.0 + WAIT_S
    assert [closed.tokens for closed in assembler.close([0], 100.0 + WAIT_S)] == [None]


@settings(max_examples=100)
@given(
    works=st.lists(
        st.tuples(
            st.sampled_from(["part", "tokens", "end", "goes on"]),
            st.sampled_from(["a", "b"]),
            st.integers(0, 5),
            st.floats(0, 0.3),
        ),
        max_size=40,
    )
)
def test_closing_at_the_due_time_always_closes_a_step(works: list[tuple[str, str, int, float]]) -> None:
    assembler, now = ScopeStepAssembler(), 0.0
    seen: list[tuple[str, int]] = []
    for what, run, step, later in works:
        now += later
        if what == "part":
            assembler.add_part((run, step), [], now, PartHeader(0))
        elif what == "tokens":
            assembler.add_tokens((run, step), Frame(FrameType.SCOPE_TOKENS, {}), now)
        elif what == "end":
            assembler.end(run)
        else:
            assembler.reopen(run)
        seen += [(step_parts.run, step_parts.step) for step_parts in assembler.close([0, 1], now)]
    while (due := assembler.due_s()) is not None:
        closed = assembler.close([0, 1], max(now, due))
        assert closed, "else the hub would come back for ever"
        seen += [(step_parts.run, step_parts.step) for step_parts in closed]
    assert len(assembler) == 0
    for run in "ab":
        steps = [step for run_id, step in seen if run_id == run]
        assert steps == sorted(set(steps))


def test_a_run_that_is_cancelled_in_its_prefill_ends_with_a_gap() -> None:
    now = [0.0]
    parts = [rank_frame for rank_frame in published() if rank_frame[1].type != FrameType.SCOPE_TOKENS]
    until = next(place for place, (_, frame) in enumerate(parts) if frame.header.get("state") == "decoding")
    core = fed(parts[:until], clock=lambda: now[0])
    core.ingest.take_frame(0, 0, scope_session.run_state(recording(), "cancelled"))
    run = core.runs[scope_session.RUN]
    now[0] = WAIT_S
    core.ingest.close_due()
    assert [(gap["what"], gap["from"], gap["reason"]) for gap in gaps(run)] == [("step", 0, "late")]
    assert run.header["state"] == "cancelled" and run.whole


def gaps(run: ScopeRun) -> list[Any]:
    journal = [frames.decode(entry.whole or b"") for entry in run.journal.after(0)]
    return [frame.header for frame in journal if frame.type == FrameType.SCOPE_GAP]


def test_dropped_parts_are_reported_and_holes_between_them_noticed() -> None:
    sent = []
    for rank, frame in published():
        at = (frame.header["step"], frame.header["part"]) if frame.type == FrameType.SCOPE_PART else None
        if at == (1, 0):
            sent.append((rank, Frame(frame.type, {**frame.header} | {"tensors": [], "dropped": True})))
        elif at != (0, 1):
            sent.append((rank, frame))
    now = [0.0]
    core = fed(sent, clock=lambda: now[0])
    now[0] = WAIT_S
    core.ingest.close_due()
    reported = [(gap["from"], gap["ranks"], gap["reason"]) for gap in gaps(core.runs[scope_session.RUN])]
    assert reported == [(0, [0], "late"), (1, [0], "slow")]


def test_coordinates_of_another_basis_are_left_out() -> None:
    sent = [
        (rank, Frame(frame.type, {**frame.header} | {"pcaVersion": frame.header.get("step")}, frame.body))
        for rank, frame in published()
    ]
    run = fed(sent).runs[scope_session.RUN]
    steps = [frames.decode(entry.whole or b"") for entry in run.journal.after(0) if entry.type == FrameType.SCOPE_STEP]
    has = [(frame.header.get("pcaVersion"), "pca" in {tensor.name for tensor in unpack(frame)}) for frame in steps]
    assert has == [(None, False), (1, True), (None, False)]


def test_tensors_that_fit_into_no_message_are_named() -> None:
    wide = Tensor("wide", "f32", np.zeros((2, 4, 70_000), "<f4"), None, {"layers": [0, 1, 2, 3], "replicated": True})
    sent = []
    for rank, frame in published():
        sent.append((rank, frame))
        if frame.type == FrameType.SCOPE_PART and frame.header["step"] == 1:
            last = {**frame.header} | {"part": 1}
            sent[-1] = rank, Frame(frame.type, {**frame.header} | {"more": True}, frame.body)
            sent.append((rank, build_frame(frame.type, last, [wide])))
    (gap,) = gaps(fed(sent).runs[scope_session.RUN])
    assert (gap["what"], gap["from"], gap["reason"], gap["tensors"]) == ("step", 1, "large", ["wide"])


def q_frame(values: Any, **header: Any) -> Frame:
    tensor = Tensor("q", "f32", np.asarray(values, "<f4"), None, header)
    return build_frame(FrameType.SCOPE_PART, {"rows": [[0, 0, 1]]}, [tensor])


@pytest.mark.parametrize(
    "frame",
    [
        q_frame([[[1, 2]]], layers=[0], heads=[2, 1]),
        q_frame([[[1, 2]]], layers=[0, 1], heads=[0, 1]),
        q_frame([[1, 2]], layers=[0], heads=[0, 1]),
        q_frame([[[1, 2]]], layers=["a"], heads=[0, 1]),
        Frame(FrameType.SCOPE_PART, {"rows": [[0, 0, 1 << 30]], "tensors": []}),
        Frame(FrameType.SCOPE_PART, {"rows": 7, "tensors": []}),
        Frame(FrameType.SCOPE_PART, {"rows": [], "tensors": [{"n": "q", "c": "f32", "s": [9], "o": 0}]}),
    ],
)
def test_parts_that_make_no_sense_are_refused(frame: Frame) -> None:
    with pytest.raises(ProtocolError, match="PART frame"):
        shard_tensors_of(frame, 0)


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    shard = shard_tensors_of(q_frame([[[1, 2]]], layers=[0], heads=[0, 2]), 0)
    for other in (
        q_frame([[[1, 2]]], layers=[0], heads=[1, 3]),
        q_frame([[[1, 2, 3]]], layers=[0], heads=[0, 2]),
        q_frame([[[[1]]]], layers=[0], heads=[2, 3]),
    ):
        with pytest.raises(ProtocolError):
            merge(shard + shard_tensors_of(other, 1))
    with pytest.raises(ProtocolError, match="layer 5"):
        merge(shard_tensors_of(q_frame([[[1, 2]]], layers=[5], heads=[0, 2]), 0), layers=4)


STD = {"reducer": "std", "width": 8, "pixels": 1, "shards": 2, "shard": 0}


def states(values: Any = ((((1.0, 2.0),),)), rows: tuple[int, int, int] = (0, 0, 1), **change: Any) -> Frame:
    tensor = Tensor("q", "f32", np.asarray(values, "<f4"), None, {"layers": [0], "merge": STD | change})
    return build_frame(FrameType.SCOPE_PART, {"rows": [list(rows)]}, [tensor])


def test_states_of_shards_are_merged() -> None:
    both = shard_tensors_of(states(), 0) + shard_tensors_of(states([[[3.0, 6.0]]], shard=1), 1)
    expected = np.sqrt((2 + 6 + 4 * (1 + 1)) / 8)
    assert merge(both).data.tolist() == [[[np.float32(expected)]]]
    assert merge([*both, *shard_tensors_of(states([[[9.0, 9.0]]], shard=1), 2)]).data.tolist() == [
        [[np.float32(expected)]]
    ]
    assert np.isnan(merge(both[:1]).data).all()
    table = merge(both, layers=3)
    assert (table.layers, np.isnan(table.data[0, :, 0]).tolist()) == ((0, 1, 2), [False, True, True])
    huge = shard_tensors_of(states([[[3e38, 3e38]]], reducer="histogram(2, 0, 1)"), 0)
    assert np.isinf(merge([*huge, *(dataclasses.replace(one, shard=shard_of(1, one)) for one in huge)]).data).all()


def test_a_capture_that_changes_within_a_step_merges_each_row_as_requested() -> None:
    captures = [([[[1.0, 2.0]]], (0, 0, 1), "std"), ([[[4.0]]], (0, 1, 1), "mean")]
    parts = [
        (states(values, rows, reducer=reducer, shard=shard), shard)
        for values, rows, reducer in captures
        for shard in (0, 1)
    ]
    table = merge([q_frame for frame, tp in parts for q_frame in shard_tensors_of(frame, tp)])
    assert (table.rows, table.data[:, 0, 0].tolist()) == (((0, 0), (0, 1)), [np.float32(np.sqrt(0.5)), 1.0])


def shard_of(shard: int, tensor: Any) -> Any:
    return tensor.shard.model_copy(update={"shard": shard})


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (states(shards=1, pixels=1), "merge.shards"),
        (states(reducer="data[0]"), "merge: column 6"),
        (states([[[1.0]]]), "not what is said"),
        (states([[1.0, 2.0]]), "not what is said"),
        (states([[[1.0, 2.0]]], shard=2), "shard 2 of 2"),
        (q_frame([[[1, 2]]], layers=[0], merge=7), "merge"),
    ],
)
def test_states_that_make_no_sense_are_refused(frame: Frame, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        shard_tensors_of(frame, 0)


def test_states_that_do_not_fit_each_other_are_refused() -> None:
    shard = shard_tensors_of(states(), 0)
    with pytest.raises(ProtocolError, match="do not fit each other"):
        merge(shard + shard_tensors_of(states(shards=4, pixels=2), 1))
    with pytest.raises(ProtocolError, match="do not fit each other"):
        merge(shard + shard_tensors_of(q_frame([[[1, 2]]], layers=[0]), 1))
    with pytest.raises(ProtocolError, match="layer 0 of a model of 0"):
        merge(shard, layers=0)


def test_a_large_shard_count_in_a_header_allocates_no_memory() -> None:
    many = {"reducer": "histogram(256, 0, 1)", "width": 1 << 20, "shards": 1024}
    values = np.zeros((512, 1, 256), "<f4")
    (shard,) = shard_tensors_of(states(values, (0, 0, 512), **many), 0)
    with pytest.raises(ProtocolError, match="the states of a step are more than"):
        merge([shard])
    assert np.isnan(merge([dataclasses.replace(shard, rows=((0, 0),) * 512)]).data).all()


def test_states_of_all_tensors_of_a_step_count_together() -> None:
    rows = merging.MAX_NUMBERS // 1024 // 2
    few = shard_tensors_of(states(np.zeros((rows, 1, 1)), (0, 0, rows), reducer="mean", width=1024, shards=1024), 0)
    named = {
        name: [dataclasses.replace(few[0], tensor=dataclasses.replace(few[0].tensor, name=name))] for name in "qkv"
    }
    assert set(merge_all({name: named[name] for name in "qk"})) == {"q", "k"}
    for refused in (dict(named), {"q": named["q"]}):
        with pytest.raises(ProtocolError, match="the states of a step are more than"):
            merge_all(refused, layers=None if len(refused) == 3 else 3)


@settings(max_examples=50)
@given(sent=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1))
def test_only_rows_with_a_whole_pixel_are_merged(sent: set[tuple[int, int]]) -> None:
    header = {"reducer": "mean", "pixels": 2, "shards": 4}
    frames_sent = [states([[[1.0 + shard + 4 * row]]], (0, row, 1), shard=shard, **header) for shard, row in sent]
    merged: list[int] = []
    combine = ReductionPlan.combine

    def counted(plan: ReductionPlan, parts: Any) -> Any:
        merged.append(len(parts[0]))
        return combine(plan, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReductionPlan, "combine", counted)
        table = merge([tensor for frame in frames_sent for tensor in shard_tensors_of(frame, 0)])
    whole = {(row, pixel) for row in range(6) for pixel in (0, 1) if {(2 * pixel, row), (2 * pixel + 1, row)} <= sent}
    assert sum(merged) == len({row for row, _ in whole})
    for place, (_, row) in enumerate(table.rows):
        for pixel, number in enumerate(table.data[place, 0]):
            mean = (2 * (1.0 + 4 * row) + 4 * pixel + 1) / 4  # of two shards of two numbers each, which they sum
            assert number == np.float32(mean) if (row, pixel) in whole else np.isnan(number)


def test_rows_merged_in_batches_are_equal_to_rows_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(0)
    both = [shard_tensors_of(states(source.random((9, 1, 2)), (0, 4, 9), shard=shard), shard)[0] for shard in (0, 1)]
    at_once = merge(both).data
    monkeypatch.setattr(merging, "AT_ONCE", 8)
    assert np.array_equal(merge(both).data, at_once) and np.isfinite(at_once).all()


def test_rows_are_ranges() -> None:
    assert rows_of([[1, 3, 2], [0, 7, 1]]) == ((1, 3), (1, 4), (0, 7))
