"""Downloads of sessions: who is too slow, and what a file says that was ended."""

import functools

import pytest
import scope_session
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.delivery.session_download import (
    CHUNK_BYTES,
    MAX_OF_CALLER,
    ReadRateMonitor,
    download_limits,
)
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.web.problems import HttpError


@given(st.lists(st.floats(0, 5), min_size=1, max_size=80), st.floats(1, 1000))
def test_who_keeps_the_rate_is_never_ended_and_who_does_not_is_after_its_patience(
    waits: list[float], rate: float
) -> None:
    fair, slow = ReadRateMonitor(rate, patience_s=6), ReadRateMonitor(rate, patience_s=6)
    for seconds in waits:
        fair.took(int(seconds * rate) + 1, seconds)
        assert fair.left_s >= 1, "each wait of at most 5 s has brought its bytes"
    lost_s = 0.0
    for seconds in waits:
        slow.took(int(seconds * rate / 2), seconds)
        lost_s += seconds / 2
        assert slow.left_s <= 6 - lost_s + len(waits) / rate


def test_places_are_shared_out_by_callers() -> None:
    slots = download_limits()
    taken = [slots.acquire({"jane": MAX_OF_CALLER}) for _ in range(MAX_OF_CALLER)]
    with pytest.raises(HttpError, match="you download 2 sessions") as refusal:
        slots.acquire({"jane": MAX_OF_CALLER})
    assert (refusal.value.status, refusal.value.code, refusal.value.retry_s) == (429, "too-many-sessions", 1)
    taken += [slots.acquire({name: MAX_OF_CALLER}) for name in ("joe", "jim")]
    with pytest.raises(HttpError, match="4 sessions are being downloaded"):
        slots.acquire({"jill": MAX_OF_CALLER})
    taken.pop(0).close()
    slots.acquire({"jane": MAX_OF_CALLER}).close()
    for slot in taken:
        slot.close()
    assert (slots.in_use(), slots.in_use("jane")) == (0, 0)


@functools.cache
def recorded() -> bytes:
    return scope_session.session(scope_session.record(tokens=2))


@pytest.mark.parametrize("removed", [0, 8, 1000 * 8])
def test_an_aborted_download_reports_the_error_wherever_it_broke_off(removed: int) -> None:
    whole = recorded()
    error = {"code": "too-slow", "message": "the download was ended", "hint": "Again."}
    end = frames.encode(Frame(FrameType.ERROR, error))
    assert CHUNK_BYTES % 8 == 0
    found, all_of_it = session_file.parse(whole[: len(whole) - removed] + end), session_file.parse(whole)
    assert all_of_it.broken is None
    assert found.broken == f"the download was ended (Again.); {len(found.frames)} frames before it were read"
    assert [frame.header for frame in found.frames] == [frame.header for frame in all_of_it.frames[: len(found.frames)]]
    assert (len(found.frames) == len(all_of_it.frames)) == (removed == 0)
