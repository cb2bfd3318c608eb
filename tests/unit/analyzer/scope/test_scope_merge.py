"""Parts of any layout, in any order, make the same step."""

import functools
from typing import Any

import numpy as np
import pytest
import scope_session
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.scope.desk import ScopeDesk, ScopeSettings
from megatronapp_analyzer.hub.scope.merge import merge, pieces_of, rows_of
from megatronapp_analyzer.hub.scope.steps import WAIT_S, StepBook
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.codes import Code, decode
from megatronapp_common.scope.protocol import Tensor, frame_of, unpack

LAYOUTS = [(1, 1, False), (2, 1, False), (1, 2, False), (4, 1, True), (2, 2, True), (4, 4, False)]


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=3)


def shown(desk: ScopeDesk) -> list[bytes]:
    run = desk.runs[scope_session.RUN]
    return [entry.whole for entry in run.journal.after(0) if entry.whole and entry.type != FrameType.SCOPE_RUN]


@functools.cache
def published(tp: int = 1, pp: int = 1, parallel: bool = False) -> list[tuple[int, Frame]]:
    return list(scope_session.rank_frames(recording(), tp=tp, pp=pp, sequence_parallel=parallel))


@functools.cache
def reference() -> list[tuple[int, dict[str, Any], bytes]]:
    return [unnumbered(one) for one in shown(fed(published()))]


def fed(frames_: list[tuple[int, Frame]], clock: Any = lambda: 0.0) -> ScopeDesk:
    desk = ScopeDesk(ScopeSettings(job="tiny"), clock=clock)
    for rank, frame in frames_:
        desk.take(0, rank, frame)
    return desk


@settings(max_examples=12, deadline=None)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_any_layout_and_any_order_of_ranks_give_the_same_frames(
    data: st.DataObject, layout: tuple[int, int, bool]
) -> None:
    tp, pp, parallel = layout
    sent = published(tp, pp, parallel)
    first = {FrameType.SCOPE_PUBLISHER, FrameType.SCOPE_RUN_STATE}
    ready = [one for one in sent if one[1].type in first]
    rest = [one for one in sent if one[1].type not in first]
    order = data.draw(st.permutations([rank for rank, _ in rest]))
    queues = {rank: iter([one for one in rest if one[0] == rank]) for rank in set(order)}
    desk = fed(ready + [next(queues[rank]) for rank in order])
    assert desk.errors == 0
    assert [unnumbered(one) for one in shown(desk)] == reference()


def unnumbered(data: bytes) -> tuple[int, dict[str, Any], bytes]:
    frame = frames.decode(data)
    return frame.type, {key: value for key, value in frame.header.items() if key != "seq"}, bytes(frame.body)


def test_what_is_shown_is_what_the_model_computed() -> None:
    run = recording()
    steps = [Frame(*one) for one in reference() if one[0] == FrameType.SCOPE_STEP]
    assert [frame.header["step"] for frame in steps] == [0, 1, 2]
    for frame in steps:
        found = {tensor.name: tensor for tensor in unpack(frame)}
        for index, (sample, position) in enumerate(frame.header["rows"]):
            expected = scope_session.tables(run, sample)
            for name in expected.keys() & found.keys():
                close(found[name], index, expected[name][position])
            logits = run.sites[sample]["logits"][position]
            assert found["top.id"].data[index, 0] == logits.argmax()
    assert "pca" in found and found["mlp1"].code == "i8"


def close(tensor: Tensor, index: int, expected: Any) -> None:
    scales = None if tensor.scales is None else tensor.scales[index]
    worst = {"i8": 0 if scales is None else scales.max() / 2, "u8": 0.002, "f16": 0.002 * np.abs(expected).max()}
    got = decode(Code(tensor.code), tensor.data[index], scales)
    np.testing.assert_allclose(got, expected, atol=float(worst[tensor.code]) * 1.01, rtol=0)


def test_a_step_is_closed_without_late_ranks_and_says_who_they_are() -> None:
    now = [0.0]
    sent = list(scope_session.rank_frames(recording(), pp=2))
    late = [one for one in sent if one[0] == 1 and one[1].type == FrameType.SCOPE_PART]
    kept = [one for one in sent if one[0] != 1 or one[1].type != FrameType.SCOPE_PART]
    desk = fed(kept, clock=lambda: now[0])
    run = desk.runs[scope_session.RUN]
    assert not any(entry.type == FrameType.SCOPE_STEP for entry in run.journal.after(0))
    now[0] = WAIT_S
    desk.close_due()
    told = [frames.decode(entry.whole or b"") for entry in run.journal.after(0)]
    gaps = [frame.header for frame in told if frame.type == FrameType.SCOPE_GAP]
    assert [(gap["what"], gap["ranks"], gap["reason"], gap["from"]) for gap in gaps] == [
        ("ranks", [1], "late", step) for step in range(3)
    ]
    steps = [frame for frame in told if frame.type == FrameType.SCOPE_STEP]
    norms = {tensor.name: tensor.data for tensor in unpack(steps[1])}["residual.norm"]
    assert np.isfinite(norms[:, :2]).all() and np.isnan(norms[:, 2:]).all()
    before = len(run.journal)
    for rank, frame in late:
        desk.take(0, rank, frame)
    assert len(run.journal) == before


def test_nothing_overtakes_a_step_that_may_still_come() -> None:
    book = StepBook()
    tokens = Frame(FrameType.SCOPE_TOKENS, {})
    book.add_tokens(("run", 1), tokens, 0.0)
    book.add_part(("run", 1), 0, [], 0.0, more=False)
    assert book.close([0], 0.1) == []
    book.add_tokens(("run", 0), tokens, 0.1)
    book.add_part(("run", 0), 0, [], 0.1, more=True)
    assert book.close([0], 0.15) == []
    book.add_part(("run", 0), 0, [], 0.15, more=False)
    assert [step.step for step in book.close([0], 0.15)] == [0, 1]
    assert len(book) == 0 and book.due_s() is None


def test_steps_that_never_get_tokens_do_not_fill_memory() -> None:
    book = StepBook()
    for step in range(500):
        book.add_part(("run", step), 0, [], step * 1e-3, more=False)
        book.close([0], step * 1e-3)
    assert len(book) <= 64


def piece(values: Any, **said: Any) -> Frame:
    tensor = Tensor("q", "f32", np.asarray(values, "<f4"), None, said)
    return frame_of(FrameType.SCOPE_PART, {"rows": [[0, 0, 1]]}, [tensor])


@pytest.mark.parametrize(
    "frame",
    [
        piece([[[1, 2]]], layers=[0], heads=[2, 1]),
        piece([[[1, 2]]], layers=[0, 1], heads=[0, 1]),
        piece([[1, 2]], layers=[0], heads=[0, 1]),
        piece([[[1, 2]]], layers=["a"], heads=[0, 1]),
        Frame(FrameType.SCOPE_PART, {"rows": [[0, 0, 1 << 30]], "tensors": []}),
        Frame(FrameType.SCOPE_PART, {"rows": 7, "tensors": []}),
        Frame(FrameType.SCOPE_PART, {"rows": [], "tensors": [{"n": "q", "c": "f32", "s": [9], "o": 0}]}),
    ],
)
def test_parts_that_make_no_sense_are_refused(frame: Frame) -> None:
    with pytest.raises(ProtocolError, match="PART frame"):
        pieces_of(frame, 0)


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    one = pieces_of(piece([[[1, 2]]], layers=[0], heads=[0, 2]), 0)
    for other in (
        piece([[[1, 2]]], layers=[0], heads=[1, 3]),
        piece([[[1, 2, 3]]], layers=[0], heads=[0, 2]),
        piece([[[[1]]]], layers=[0], heads=[2, 3]),
    ):
        with pytest.raises(ProtocolError):
            merge(one + pieces_of(other, 1))
    with pytest.raises(ProtocolError, match="layer 5"):
        merge(pieces_of(piece([[[1, 2]]], layers=[5], heads=[0, 2]), 0), layers=4)


def test_rows_are_ranges() -> None:
    assert rows_of([[1, 3, 2], [0, 7, 1]]) == ((1, 3), (1, 4), (0, 7))
