"""Runs end, whatever becomes of the model; tokens that were missed are noticed."""

import functools

import pytest
import scope_session

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.scope.desk import ScopeDesk, ScopeSettings
from megatronapp_analyzer.hub.scope.engine import PATIENCE_S
from megatronapp_analyzer.hub.scope.headers import SampleHeader
from megatronapp_analyzer.hub.scope.run import Run
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType

RUN = scope_session.RUN


@functools.cache
def published() -> list[Frame]:
    return [frame for _, frame in scope_session.rank_frames(scope_session.record(tokens=3))]


def decoding(clock: list[float]) -> ScopeDesk:
    """A desk that has seen the prefill of a run."""
    desk = ScopeDesk(ScopeSettings(job="tiny"), clock=lambda: clock[0])
    for frame in published():
        desk.take(0, 0, frame)
        if frame.header.get("state") == "decoding":
            return desk
    raise AssertionError


def outcome(desk: ScopeDesk) -> tuple[str, str | None]:
    header = desk.runs[RUN].header
    return header["state"], (header["error"] or {}).get("code")


def test_an_agent_that_comes_back_in_time_brings_its_runs_back() -> None:
    clock = [0.0]
    desk = decoding(clock)
    desk.lost(0, 0)
    assert desk.state == "restarting"
    clock[0] = PATIENCE_S - 1
    desk.close_due()
    assert outcome(desk) == ("decoding", None)
    desk.take(0, 0, published()[0])
    assert desk.state == "ready"
    clock[0] = 10 * PATIENCE_S
    desk.close_due()
    assert outcome(desk) == ("decoding", None)


def test_an_agent_that_stays_away_loses_them_and_what_rank_zero_says_later_is_true() -> None:
    clock = [0.0]
    desk = decoding(clock)
    desk.lost(0, 0)
    clock[0] = PATIENCE_S
    desk.close_due()
    assert outcome(desk) == ("failed", "engine-lost")
    sent = published()
    for frame in [sent[0], *sent[[one.header.get("state") for one in sent].index("decoding") :]]:
        desk.take(0, 0, frame)
    assert outcome(desk) == ("done", None) and desk.runs[RUN].whole


@pytest.mark.parametrize("ending", ["left", "bye", "newer agent", "newer ranks"])
def test_a_rank_zero_that_is_gone_for_good_is_not_waited_for(ending: str) -> None:
    desk = decoding([0.0])
    if ending == "left":
        desk.take(0, 0, Frame(FrameType.SCOPE_LEFT, {"rank": 0}))
    elif ending == "bye":
        desk.lost(0, 0, for_good=True)
    elif ending == "newer agent":
        desk.begins(1)
    else:
        desk.take(1, 0, Frame(FrameType.SCOPE_PUBLISHER, {**published()[0].header, "attempt": 1}))
    assert outcome(desk) == ("failed", "engine-lost")
    states = [one.header["state"] for one in told(desk.runs[RUN]) if one.type == FrameType.SCOPE_RUN]
    assert states[-1] == "failed"


def test_another_rank_that_leaves_takes_no_run_with_it() -> None:
    desk = decoding([0.0])
    desk.take(0, 0, Frame(FrameType.SCOPE_LEFT, {"rank": 1}))
    assert outcome(desk) == ("decoding", None) and desk.state == "ready"


def told(run: Run) -> list[Frame]:
    return [frames.decode(one.whole or b"") for one in run.journal.after(0)]


def test_tokens_that_rank_zero_counts_and_nobody_brought_are_a_hole() -> None:
    holes: list[str] = []
    desk = decoding([0.0])
    desk.on_hole = lambda run: holes.append(run.id)
    done = scope_session.run_state(scope_session.record(tokens=3), "done")
    desk.take(0, 0, Frame(done.type, {**done.header, "steps": 1}))
    assert not holes and desk.runs[RUN].whole
    desk.take(0, 0, Frame(done.type, {**done.header, "steps": 3}))
    assert holes == [RUN] and not desk.runs[RUN].whole


def test_what_is_filled_in_must_be_of_the_run() -> None:
    run = decoding([0.0]).runs[RUN]
    with pytest.raises(ProtocolError, match="1 samples, not 2"):
        run.fill([SampleHeader()])
