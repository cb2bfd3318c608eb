"""Runs end even if the model is lost; tokens that were missed are noticed."""

import asyncio
import functools
from typing import Any

import httpx
import pytest
import scope_session

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.ingest.engine_liveness import PATIENCE_S
from megatronapp_analyzer.scope.ingest.events import IgnoredEvents, ScopeEvents
from megatronapp_analyzer.scope.parts.wire_models import SampleHeader
from megatronapp_analyzer.scope.probes import token_backfill
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_analyzer.scope.service import ScopeService
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol_requests import ProbeRequest, ProbeSite
from megatronapp_common.web.problems import HttpError

RUN = scope_session.RUN


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=3)


@functools.cache
def published() -> list[Frame]:
    return [frame for _, frame in scope_session.rank_frames(recording())]


def decoding(clock: list[float], events: ScopeEvents | None = None) -> ScopeCore:
    """A core that has seen the prefill of a run."""
    core = ScopeCore(ScopeSettings(job="tiny"), clock=lambda: clock[0], events=events)
    for frame in published():
        core.ingest.take_frame(0, 0, frame)
        if frame.header.get("state") == "decoding":
            return core
    raise AssertionError


def outcome(core: ScopeCore) -> tuple[str, str | None]:
    header = core.runs[RUN].header
    return header["state"], (header["error"] or {}).get("code")


def test_an_agent_that_reconnects_in_time_restores_its_runs_and_their_ends() -> None:
    clock, outcomes = [0.0], list[tuple[str, str | None]]()

    class EngineStarts(IgnoredEvents):
        def engine_started(self) -> None:
            if RUN in core.runs:
                outcomes.append(outcome(core))

    core = ScopeCore(ScopeSettings(job="tiny"))
    core = decoding(clock, EngineStarts())
    core.ingest.on_agent_lost(0, 0)
    assert core.feed.state == "restarting"
    clock[0] = PATIENCE_S - 1
    core.ingest.close_due()
    assert outcome(core) == ("decoding", None)
    core.ingest.take_frame(0, 0, published()[0])
    assert core.feed.state == "ready" and outcomes == [("decoding", None)], "rank 0 is asked how it stands"
    done = scope_session.run_state(recording(), "done")
    for _ in range(3):
        core.ingest.take_frame(0, 0, done)
    assert outcome(core) == ("done", None)
    states = [frame.header["state"] for frame in journal_frames(core.runs[RUN]) if frame.type == FrameType.SCOPE_RUN]
    assert core.runs[RUN].journal.newest == len(journal_frames(core.runs[RUN])) and states[-2:] == ["decoding", "done"]


def test_repeated_end_frames_evict_no_run() -> None:
    core = ScopeCore(ScopeSettings(job="tiny", runs=3), clock=lambda: 0.0)
    state = scope_session.run_state(recording(), "done")
    ends = [Frame(state.type, {**state.header, "run": f"run{number}"}) for number in range(5)]
    for frame in [published()[0], *ends, published()[0], *ends]:
        core.ingest.take_frame(0, 0, frame)
    assert list(core.runs) == ["run2", "run3", "run4"] and core.runs["run4"].journal.newest == 1


Answer = tuple[int, dict[str, Any]]
NO_RUN: Answer = (404, {"code": "no-such-run", "message": "", "hint": ""})
UNAVAILABLE: Answer = (503, {"code": "restarting", "message": "", "hint": ""})
OUTCOMES: list[tuple[Answer, tuple[str, str | None]]] = [
    ((200, {"header": {"state": "done"}}), ("done", None)),
    ((200, {"header": {"state": "decoding"}}), ("decoding", None)),
    (NO_RUN, ("failed", "engine-lost")),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("answer", "expected"), OUTCOMES)
async def test_a_returning_rank_zero_is_queried_for_unfinished_runs(
    answer: Answer, expected: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_backfill, "RETRY_S", 0)
    answers = iter([UNAVAILABLE, answer])

    def of_rank_zero(request: httpx.Request) -> httpx.Response:
        if request.url.path != f"/scope/v1/runs/{RUN}":
            return httpx.Response(200, json={})
        status, body = next(answers)
        if status == 200:
            header = scope_session.run_state(recording(), body["header"]["state"]).header
            body = {"header": header, "samples": []}
        return httpx.Response(status, json=body)

    scope = ScopeService(ScopeSettings(job="tiny"))
    scope.probe_client.client = Rank0Client("http://model", "token", transport=httpx.MockTransport(of_rank_zero))
    async with scope.running(), asyncio.timeout(120):
        for frame in published():
            scope.core.ingest.take_frame(0, 0, frame)
            if frame.header.get("state") == "decoding":
                break
        scope.core.ingest.on_agent_lost(0, 0)
        scope.core.ingest.take_frame(0, 0, published()[0])
        assert len(scope.backfill._looks) == 1
        await asyncio.gather(*scope.backfill._looks.values())
        assert outcome(scope.core) == expected and next(answers, None) is None


def test_an_agent_that_stays_disconnected_fails_its_runs_until_rank_zero_reports() -> None:
    clock = [0.0]
    core = decoding(clock)
    core.ingest.on_agent_lost(0, 0)
    clock[0] = PATIENCE_S
    core.ingest.close_due()
    assert outcome(core) == ("failed", "engine-lost")
    sent = published()
    for frame in [sent[0], *sent[[frame.header.get("state") for frame in sent].index("decoding") :]]:
        core.ingest.take_frame(0, 0, frame)
    assert outcome(core) == ("done", None) and core.runs[RUN].whole


@pytest.mark.parametrize("ending", ["left", "bye", "newer agent", "newer ranks"])
def test_a_rank_zero_that_left_for_good_is_not_waited_for(ending: str) -> None:
    core = decoding([0.0])
    if ending == "left":
        core.ingest.take_frame(0, 0, Frame(FrameType.SCOPE_LEFT, {"rank": 0}))
    elif ending == "bye":
        core.ingest.on_agent_lost(0, 0, for_good=True)
    elif ending == "newer agent":
        core.ingest.on_attempt(1)
    else:
        core.ingest.take_frame(1, 0, Frame(FrameType.SCOPE_PUBLISHER, {**published()[0].header, "attempt": 1}))
    assert outcome(core) == ("failed", "engine-lost")
    states = [frame.header["state"] for frame in journal_frames(core.runs[RUN]) if frame.type == FrameType.SCOPE_RUN]
    assert states[-1] == "failed"


def test_another_rank_that_leaves_takes_no_run_with_it() -> None:
    core = decoding([0.0])
    core.ingest.take_frame(0, 0, Frame(FrameType.SCOPE_LEFT, {"rank": 1}))
    assert outcome(core) == ("decoding", None) and core.feed.state == "ready"


@pytest.mark.parametrize(("ending", "code"), [("broken", "probe-incomplete"), ("bye", "engine-lost")])
def test_probes_do_not_wait_for_disconnected_ranks(ending: str, code: str) -> None:
    core = decoding([0.0])
    core.probes.expect("waits", "key", lambda _: None, 0.0, caller="me")
    core.ingest.take_frame(0, 0, Frame(FrameType.SCOPE_PART, {"rank": 0, "probe": "early", "rows": [], "tensors": []}))
    core.ingest.on_agent_lost(0, 0, for_good=ending == "bye")
    failure = core.probes.take_failure("key")
    assert core.probes.count("me") == 0 and failure is not None
    assert (failure.status, failure.code) == (503, code)
    core.probes.expect("early", "other", lambda _: None, 0.0)
    core.probes.settle([], 0.0)
    assert core.probes.take_failure("other") is not None and len(core.probes) == 0


@pytest.mark.asyncio
async def test_a_probe_in_flight_is_refused_when_its_ranks_disconnect() -> None:
    scope = ScopeService(ScopeSettings(job="tiny"))
    probe_request = ProbeRequest(ids=((1,),), sites=(ProbeSite(site="logits", layers=()),))

    def of_rank_zero(request: httpx.Request) -> httpx.Response:
        scope.core.ingest.on_agent_lost(0, 0)
        return httpx.Response(200, json={"probe": "told to nobody"})

    scope.probe_client.client = Rank0Client("http://model", "token", transport=httpx.MockTransport(of_rank_zero))
    async with scope.running():
        scope.core.ingest.take_frame(0, 0, published()[0])
        with pytest.raises(HttpError, match="disconnected") as refused:
            await scope.probe_client.request("key", probe_request, lambda _: None, "me")
        assert refused.value.status == 503 and len(scope.core.probes) == 0


def journal_frames(run: ScopeRun) -> list[Frame]:
    return [frames.decode(entry.whole or b"") for entry in run.journal.after(0)]


def test_tokens_counted_by_rank_zero_but_never_received_are_reported_missing() -> None:
    holes: list[str] = []

    class MissingTokens(IgnoredEvents):
        def tokens_missing(self, run: ScopeRun) -> None:
            holes.append(run.id)

    core = decoding([0.0], MissingTokens())
    done = scope_session.run_state(recording(), "done")
    core.ingest.take_frame(0, 0, Frame(done.type, {**done.header, "steps": 1}))
    assert not holes and core.runs[RUN].whole
    core.ingest.take_frame(0, 0, Frame(done.type, {**done.header, "steps": 3}))
    assert holes == [RUN] and not core.runs[RUN].whole


def test_what_is_filled_in_must_be_of_the_run() -> None:
    run = decoding([0.0]).runs[RUN]
    with pytest.raises(ProtocolError, match="1 samples, not 2"):
        run.fill([SampleHeader()])
