"""MegaScope through a real hub: an agent brings frames of ranks, pages look."""

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import scope_session
from scope_pages import RUN, agents, play, receive, recording, until_done, viewer
from websockets.exceptions import ConnectionClosed, InvalidStatus

from megatronapp_analyzer.scope.delivery import page_socket
from megatronapp_analyzer.scope.delivery.limits import too_many_pages
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.codes import TensorCode, decode
from megatronapp_common.scope.protocol import SUBPROTOCOL, unpack
from megatronapp_common.web.concurrency_limits import ConcurrencyLimits
from megatronapp_common.web.token_bucket import BucketSize
from megatronapp_common.web.tokens import TokenRole

pytestmark = pytest.mark.asyncio


async def test_a_page_sees_what_the_ranks_computed(hub: Any, fake_job: Any, until: Any) -> None:
    async with agents(hub, fake_job) as workers, viewer(hub) as page:
        hello = await receive(page)
        assert (hello.type, page.subprotocol) == (FrameType.SCOPE_HELLO, SUBPROTOCOL)
        assert (hello.header["role"], hello.header["state"], hello.header["job"]) == ("viewer", "gone", "demo")
        await play(hub, workers, until=until, tp=2, pp=2)
        got = await until_done(page)
        states = [frame.header for frame in got if frame.type == FrameType.SCOPE_STATE]
        assert [state["state"] for state in states] == ["ready", "ready"]
        assert [len(state["layout"].get("ranks", ())) for state in states] == [0, 4], "told again once all have begun"
        got = [frame for frame in got if frame.type != FrameType.SCOPE_STATE]
        seqs = [frame.header["seq"] for frame in got]
        assert seqs == sorted(set(seqs))
        steps = [frame for frame in got if frame.type == FrameType.SCOPE_STEP]
        assert [frame.header["ids"] for frame in steps] == [
            list(ids) for ids in zip(*recording().generated, strict=True)
        ]
        (sample, position), last = steps[-1].header["rows"][0], {tensor.name: tensor for tensor in unpack(steps[-1])}
        expected = scope_session.tables(recording(), sample)
        scales = last["q"].scales
        assert scales is not None
        found = decode(TensorCode.I8, last["q"].data, scales)[0]
        np.testing.assert_allclose(found, expected["q"][position], atol=float(scales.max()))
        assert [frame.header["sample"] for frame in got if frame.type == FrameType.SCOPE_OVERVIEW] == [0, 1]
        async with viewer(hub, TokenRole.CONTROLLER) as other:
            header = (await receive(other)).header
            assert header["role"] == "controller"
            assert header["model"] == recording().shape.model()
            assert (header["layout"]["tensor"], header["layout"]["pipeline"]) == (2, 2)
            assert [run["run"] for run in header["runs"]] == [RUN]


async def test_after_a_reconnect_a_page_gets_what_it_missed(hub: Any, fake_job: Any, until: Any) -> None:
    async with agents(hub, fake_job) as workers:
        async with viewer(hub) as page:
            await play(hub, workers, until=until)
            await receive(page)
            everything = (await until_done(page))[1:]
        async with viewer(hub) as page:
            await receive(page)
            await page.send(json.dumps({"type": "resume", "run": RUN, "seq": everything[3].header["seq"]}))
            again = await until_done(page)
        assert [frame.header["seq"] for frame in again] == [frame.header["seq"] for frame in everything[4:]]
        assert [bytes(frame.body) for frame in again] == [bytes(frame.body) for frame in everything[4:]]
        async with viewer(hub) as page:
            await receive(page)
            await page.send(json.dumps({"type": "resume", "run": RUN, "seq": 10_000}))
            assert len(await until_done(page)) == len(everything)


async def test_without_credit_a_page_gets_tokens_and_gap_frames(hub: Any, fake_job: Any, until: Any) -> None:
    async with agents(hub, fake_job) as workers, viewer(hub) as page, viewer(hub) as other:
        await receive(page)
        await receive(other)
        viewers = hub.hub.scope.core.feed._viewers
        for subscriber in viewers:
            subscriber.outbox.credit = 0
        await other.send(json.dumps({"type": "credit", "bytes": 1 << 20}))

        async def granted() -> bool:
            return any(viewer.outbox.credit for viewer in viewers)

        await until(granted)
        await play(hub, workers, until=until)
        poor, rich = await until_done(page), await until_done(other)
        steps = [frame for frame in poor if frame.type == FrameType.SCOPE_STEP]
        assert [frame.header["ids"] for frame in steps] == [
            list(ids) for ids in zip(*recording().generated, strict=True)
        ]
        assert all(not len(frame.body) for frame in steps)
        assert not any(frame.type in {FrameType.SCOPE_ROWS, FrameType.SCOPE_OVERVIEW} for frame in poor)
        gaps = {frame.header["what"]: frame.header for frame in poor if frame.type == FrameType.SCOPE_GAP}
        assert {"rows", "step", "overview"} <= set(gaps) and gaps["rows"]["reason"] == "slow"
        assert any(frame.type == FrameType.SCOPE_ROWS for frame in rich)
        assert not any(frame.type == FrameType.SCOPE_GAP for frame in rich)


async def test_a_page_that_stops_reading_delays_no_other_page(hub: Any, fake_job: Any, until: Any) -> None:
    header = dict(scope_session.run_state(recording(), "queued").header)
    header["prompts"] = [{"text": "x" * 200_000, "ids": [], "offsets": []}]
    async with agents(hub, fake_job, 1) as (worker,), viewer(hub, max_size=None) as dead, viewer(hub) as live:
        await receive(dead)
        dead.transport.pause_reading()
        await receive(live)
        for count in range(150):
            await worker.send(FrameType.SCOPE_RUN_STATE, header | {"position": count})
            assert (await receive(live)).header["position"] == count

        async def let_go() -> bool:
            return len(hub.hub.scope.core.feed._viewers) == 1

        await until(let_go)
        dead.transport.abort()


NO_COMMANDS = (
    b"\0" * 64,
    "{",
    "[]",
    "7",
    '{"type": 7}',
    '{"type": "eval"}',
    '{"type": "credit", "bytes": -1}',
    "x" * 5000,
    "[" * 3000,
)


async def test_an_invalid_command_is_refused_and_ends_the_connection(hub: Any) -> None:
    for message in NO_COMMANDS:
        async with viewer(hub) as page:
            await receive(page)
            await page.send(message)
            refusal = await receive(page)
            assert (refusal.type, refusal.header["code"]) == (FrameType.ERROR, "bad-message")
            with pytest.raises(ConnectionClosed):
                await receive(page)
            assert page.close_code == 1008


async def test_a_page_that_floods_is_let_go(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_socket, "MESSAGES", BucketSize(burst=200, per_s=0.001))
    async with viewer(hub) as page:
        await receive(page)
        with contextlib.suppress(ConnectionClosed):
            for _ in range(1000):
                await page.send(json.dumps({"type": "credit", "bytes": 1}))
        assert (await receive(page)).header["code"] == "too-many"


async def test_the_socket_needs_token_origin_and_subprotocol(hub: Any) -> None:
    for how in (
        {"headers": {"Authorization": "Bearer wrong"}},
        {"headers": {"Origin": "http://evil.example"}},
        {"subprotocols": None},
        {"subprotocols": ["megatronapp.scope.9"]},
    ):
        with pytest.raises(InvalidStatus):
            async with viewer(hub, **how):
                pass


async def test_invalid_frames_of_a_rank_are_counted_and_break_nothing(hub: Any, fake_job: Any, until: Any) -> None:
    wrong = [
        Frame(FrameType.SCOPE_PUBLISHER, {"rank": -1}),
        Frame(FrameType.SCOPE_RUN_STATE, {"run": RUN, "state": "dancing", "prompts": []}),
        Frame(FrameType.SCOPE_TOKENS, {"run": RUN, "step": 0, "rows": [[0]]}),
        Frame(FrameType.SCOPE_TOKENS, {"run": "none", "step": 0, "rows": [], "ids": []}),
    ]
    hub.hub.scope.core.ingest.assembler.wait_s = 0.2  # the first step has not all of its parts
    async with agents(hub, fake_job) as workers:
        for frame in wrong:
            await workers[0].send(frame.type, frame.header)
        await play(hub, workers, until=until)

        async def counted() -> bool:
            return bool(hub.hub.scope.core.ingest.rejected.count == len(wrong))

        await until(counted)


async def test_pages_are_notified_of_a_restart_of_the_model(hub: Any, fake_job: Any, until: Any) -> None:
    async with viewer(hub) as page:
        await receive(page)
        async with agents(hub, fake_job) as workers:
            await play(hub, workers, until=until)
            await until_done(page)
        state = await receive(page)
        assert (state.type, state.header["state"]) == (FrameType.SCOPE_STATE, "restarting")
        async with agents(hub, fake_job) as workers:
            await workers[0].send(FrameType.SCOPE_PUBLISHER, scope_session.publisher(recording().shape, 0, 1, 1).header)
            assert (await receive(page)).header["state"] == "ready"


async def test_runs_of_a_disconnected_rank_zero_fail(hub: Any, fake_job: Any) -> None:
    sent = [frame for _, frame in scope_session.rank_frames(recording())]
    middle = next(place for place, frame in enumerate(sent) if frame.header.get("state") == "decoding") + 1
    left = Frame(FrameType.SCOPE_LEFT, {"rank": 0})
    async with viewer(hub) as page, agents(hub, fake_job, 1) as (worker,):
        for ending in (left, None):
            for frame in sent[:middle]:
                await worker.connection.send(frames.encode(frame))
            got = [await receive(page)]
            while got[-1].header.get("state") != "decoding":
                got.append(await receive(page))
            async with contextlib.AsyncExitStack() as stack:
                if ending is not None:
                    await worker.connection.send(frames.encode(ending))
                else:
                    newer = await stack.enter_async_context(hub.agent(fake_job(attempt=1), 0))
                    await newer.hello()
                got = [await receive(page), await receive(page)]
            assert [frame.type for frame in got] == [FrameType.SCOPE_STATE, FrameType.SCOPE_RUN]
            assert got[0].header["state"] == "restarting"
            assert (got[1].header["state"], got[1].header["error"]["code"]) == ("failed", "engine-lost")


async def test_no_more_pages_than_a_hub_serves(hub: Any) -> None:
    hub.hub.scope.pages = ConcurrencyLimits("the hub", 1, refuse=too_many_pages)
    async with viewer(hub) as page, viewer(hub) as other:
        got = [await receive(connection) for connection in (page, other)]
        assert [frame.type for frame in got] == [FrameType.SCOPE_HELLO, FrameType.ERROR]
        assert got[1].header["code"] == "too-many-pages"
        with pytest.raises(ConnectionClosed):
            await receive(other)
        assert other.close_code == 1013
