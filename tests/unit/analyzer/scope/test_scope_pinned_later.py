"""A session holds the attention of heads that were pinned while their run went on."""

import itertools

import numpy as np
import scope_session

from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.session_player import SessionPlayer, settings_of
from megatronapp_common import frames
from megatronapp_common.frames import FrameType

RUN = scope_session.RUN
Rows = dict[tuple[int, int, int], dict[int, bytes]]


def played(data: bytes) -> ScopeCore:
    session = session_file.parse(data)
    assert session.broken is None
    core = ScopeCore(settings_of(session))
    for _ in SessionPlayer(session, core).steps():
        pass
    return core


def without_values() -> bytes:
    """Return a session in which rows of attention are stored in frames ROWS alone."""
    found = session_file.parse(scope_session.session(scope_session.record(tokens=4))).frames
    return b"".join(frames.encode(frame) for frame in found if frame.type != FrameType.SCOPE_VALUES)


def rows_of(core: ScopeCore) -> Rows:
    attention = core.runs[RUN].attention
    return {key: {place: row.tobytes() for place, row in attention.get(key).items()} for key in attention.stored_keys()}


def test_rows_from_before_a_head_was_pinned_are_in_the_session() -> None:
    core = played(without_values())
    run, known = core.runs[RUN], rows_of(core)
    key = next(key for key in itertools.product((0,), range(2), range(4)) if key not in known)
    first, end = len(run.prompt_ids(0)), run.length(0)
    assert first + 1 < end
    for place in range(first, end):  # as a probe brings them for who draws the whole map
        run.attention.put(key, [place], np.arange(place + 1, dtype=np.uint8)[None])
    pinned = [{"layer": key[1], "head": key[2]}]
    run.set_state(run.header | {"capture": run.header["capture"] | {"pinned": pinned}})
    expected = {place: bytes(range(place + 1)) for place in range(first, end)}
    assert rows_of(core)[key] == expected
    assert rows_of(played(session_file.dump(core.feed, RUN)))[key] == expected


def test_rows_stored_in_a_frame_are_not_sent_twice() -> None:
    core = played(without_values())
    assert rows_of(core)
    again = session_file.parse(session_file.dump(core.feed, RUN))
    assert FrameType.SCOPE_VALUES not in {frame.type for frame in again.frames}
