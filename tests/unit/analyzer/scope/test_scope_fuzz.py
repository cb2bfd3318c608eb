"""Random bytes: frames of ranks and session files are refused by name, or understood."""

import functools
import pathlib

import numpy as np
import pytest
import scope_session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest_workers import examples

from megatronapp_analyzer.errors import ProtocolError, SessionError
from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.delivery.session_file import RecordedSession
from megatronapp_analyzer.scope.parts.merge import ShardTensor, shard_tensors_of
from megatronapp_analyzer.scope.session_player import SessionPlayer, settings_of
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.views.encode import tables_of
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame, unpack

FUZZ = settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
RANKS = [FrameType.SCOPE_PUBLISHER, FrameType.SCOPE_PART, FrameType.SCOPE_TOKENS, FrameType.SCOPE_RUN_STATE]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=8) | st.just("q"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@functools.cache
def published() -> list[Frame]:
    return [frame for _, frame in scope_session.rank_frames(scope_session.record(tokens=2))]


@functools.cache
def recorded() -> bytes:
    run = scope_session.record(tokens=2)
    core = scope_session.core_of(run)
    core.runs[scope_session.RUN].values.close()
    return session_file.dump(core.feed, scope_session.RUN)


@FUZZ
@given(data=st.data())
def test_the_core_survives_arbitrary_headers_of_a_rank(data: st.DataObject) -> None:
    core = ScopeCore(ScopeSettings(job="fuzz"), clock=iter(range(1_000_000)).__next__)
    for frame in published():
        header = dict(frame.header)
        if data.draw(st.integers(0, 3)) == 0:
            name = data.draw(st.sampled_from(sorted(header)))
            header[name] = data.draw(JUNK)
        core.ingest.take_frame(0, 0, Frame(frame.type, header, frame.body))
    core.ingest.take_frame(
        0, 0, Frame(data.draw(st.sampled_from(RANKS)), data.draw(st.dictionaries(st.text(), JUNK, max_size=5)))
    )
    assert len(core.runs) <= core.settings.runs


MERGES = st.fixed_dictionaries(
    {
        "reducer": st.sampled_from(["mean", "std", "histogram(3, 0, 1)", "data[0]", ""]) | JUNK,
        "width": st.sampled_from([4, 64]) | JUNK,
        "pixels": st.integers(0, 4) | JUNK,
        "shards": st.sampled_from([2, 4, 1 << 10]) | JUNK,
        "shard": st.integers(-1, 4) | JUNK,
    }
)
STATES = st.tuples(MERGES, st.integers(1, 4), st.none() | st.lists(st.integers(0, 1 << 20), min_size=1, max_size=2))


@settings(FUZZ, max_examples=60)
@given(declared=st.lists(STATES, min_size=1, max_size=4))
def test_states_are_refused_by_name_or_merged(declared: list[tuple[object, int, list[int] | None]]) -> None:
    shards: list[ShardTensor] = []
    for tp, (merging, columns, layers) in enumerate(declared):
        shape = (2, columns) if layers is None else (2, len(layers), columns)
        tensor = Tensor("q", "f32", np.full(shape, 1e38, "<f4"), None, {"layers": layers, "merge": merging})
        try:
            shards += shard_tensors_of(build_frame(FrameType.SCOPE_PART, {"rows": [[0, tp % 2, 2]]}, [tensor]), tp)
            tables_of(shards, None)
        except ProtocolError as error:
            assert "PART frame" in str(error)


@FUZZ
@given(tensors=JUNK | st.lists(st.fixed_dictionaries({"n": JUNK, "c": JUNK, "s": JUNK, "o": JUNK}), max_size=3))
def test_tensors_are_refused_by_name_or_are_within_the_body(tensors: object) -> None:
    frame = Frame(FrameType.SCOPE_PART, {"tensors": tensors}, bytes(64))
    try:
        found = unpack(frame)
    except FrameError as error:
        assert "tensor" in str(error)
    else:
        assert all(tensor.data.nbytes <= 64 for tensor in found)


@FUZZ
@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    fraction=st.floats(0, 1),
)
def test_a_damaged_session_plays_or_explains_the_damage(changes: list[tuple[float, int]], fraction: float) -> None:
    data = bytearray(recorded())
    for place, value in changes:
        data[int(place * len(data))] = value
    session = session_file.parse(bytes(data[: int(fraction * len(data))]))
    if session.broken:
        assert session.broken.startswith("byte ")
    if not session.frames or session.frames[0].type != FrameType.SCOPE_HELLO:
        return
    try:
        player = SessionPlayer(session, ScopeCore(settings_of(session)))
    except SessionError as error:
        assert "SCOPE_HELLO" in str(error)
    else:
        assert len(list(player.steps())) <= len(session.frames)


def test_a_run_that_was_going_when_it_was_saved_ends_with_its_last_frame() -> None:
    whole = session_file.parse(recorded())
    saved = [frame for frame in whole.frames if frame.header.get("state") != "done"]
    assert len(saved) == len(whole.frames) - 1
    core = ScopeCore(settings_of(whole))
    states = [
        next(iter(core.runs.values())).header["state"]
        for _ in SessionPlayer(RecordedSession(saved, None), core).steps()
    ]
    assert not {"done", "cancelled"} & {*states}
    (run,) = core.runs.values()
    assert (run.header["state"], run.ended, run.grows()) == ("cancelled", True, False)


def test_a_file_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SessionError, match=r"none\.scope: cannot be read"):
        session_file.load(tmp_path / "none.scope")


def test_a_session_reads_back_whole() -> None:
    session = session_file.parse(recorded())
    assert session.broken is None
    assert b"".join(map(frames.encode, session.frames)) == recorded()
