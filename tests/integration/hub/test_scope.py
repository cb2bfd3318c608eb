"""MegaScope through a real hub: an agent brings frames of ranks, pages look, rank 0 is asked for more."""

import asyncio
import contextlib
import functools
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scope_rank_zero
import scope_session
import websockets.asyncio.client
from websockets.exceptions import ConnectionClosed, InvalidStatus

from megatronapp_analyzer.hub.scope.serving import ServeClient
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.codes import Code, decode
from megatronapp_common.scope.protocol import SUBPROTOCOL, unpack
from megatronapp_common.tokens import Role, derive

pytestmark = pytest.mark.asyncio
RUN = scope_session.RUN
RUNS = "/api/v1/scope/runs"
CONTROL = ("POST", RUNS), ("PATCH", f"{RUNS}/{RUN}"), ("DELETE", f"{RUNS}/{RUN}"), ("POST", f"{RUNS}/{RUN}/pca")


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=4)


def bearer(hub: Any, role: Role) -> dict[str, str]:
    return {"Authorization": f"Bearer {derive(hub.secret, role)}"}


@contextlib.asynccontextmanager
async def viewer(hub: Any, role: Role = Role.VIEWER, **how: Any) -> AsyncIterator[Any]:
    url = f"ws://127.0.0.1:{hub.port}/api/v1/scope"
    headers = bearer(hub, role) | how.pop("headers", {})
    how = {"subprotocols": [SUBPROTOCOL], "compression": None} | how
    async with websockets.asyncio.client.connect(url, additional_headers=headers, proxy=None, **how) as connection:
        yield connection


async def receive(connection: Any) -> Frame:
    return frames.decode(await asyncio.wait_for(connection.recv(), 20))


async def until_done(connection: Any) -> list[Frame]:
    got: list[Frame] = []
    while not (got and got[-1].type == FrameType.SCOPE_RUN and got[-1].header["state"] == "done"):
        got.append(await receive(connection))
    return got


@contextlib.asynccontextmanager
async def agents(hub: Any, fake_job: Any, count: int = 2) -> AsyncIterator[list[Any]]:
    async with contextlib.AsyncExitStack() as stack:
        job = fake_job()
        found = [await stack.enter_async_context(hub.agent(job, worker)) for worker in range(count)]
        for one in found:
            await one.hello()
        yield found


async def play(hub: Any, workers: list[Any], *, until: Any, **layout: Any) -> None:
    """Send everything that ranks would, each by its own agent."""
    for rank, frame in scope_session.rank_frames(recording(), **layout):
        await workers[rank % len(workers)].connection.send(frames.encode(frame))

    async def arrived() -> bool:
        run = hub.hub.scope.desk.runs.get(RUN)
        return run is not None and run.ended and all(len(found) == recording().steps for found in run.tokens)

    await until(arrived)


async def test_a_page_sees_what_the_ranks_computed(hub: Any, fake_job: Any, until: Any) -> None:
    async with agents(hub, fake_job) as workers, viewer(hub) as page:
        hello = await receive(page)
        assert (hello.type, page.subprotocol) == (FrameType.SCOPE_HELLO, SUBPROTOCOL)
        assert (hello.header["role"], hello.header["state"], hello.header["job"]) == ("viewer", "gone", "demo")
        await play(hub, workers, until=until, tp=2, pp=2)
        got = await until_done(page)
        assert got[0].type == FrameType.SCOPE_STATE and got[0].header["state"] == "ready"
        seqs = [frame.header["seq"] for frame in got[1:]]
        assert seqs == sorted(set(seqs))
        steps = [frame for frame in got if frame.type == FrameType.SCOPE_STEP]
        assert [frame.header["ids"] for frame in steps] == [
            list(ids) for ids in zip(*recording().generated, strict=True)
        ]
        (sample, position), last = steps[-1].header["rows"][0], {one.name: one for one in unpack(steps[-1])}
        expected = scope_session.tables(recording(), sample)
        scales = last["q"].scales
        assert scales is not None
        found = decode(Code.I8, last["q"].data, scales)[0]
        np.testing.assert_allclose(found, expected["q"][position], atol=float(scales.max()))
        assert [frame.header["sample"] for frame in got if frame.type == FrameType.SCOPE_OVERVIEW] == [0, 1]
        async with viewer(hub, Role.CONTROLLER) as other:
            header = (await receive(other)).header
            assert header["role"] == "controller"
            assert header["model"] == recording().shape.model()
            assert header["layout"] == {"tensor": 2, "pipeline": 2}
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


async def test_without_credit_a_page_gets_tokens_and_is_told_what_is_missing(
    hub: Any, fake_job: Any, until: Any
) -> None:
    async with agents(hub, fake_job) as workers, viewer(hub) as page, viewer(hub) as other:
        await receive(page)
        await receive(other)
        viewers = hub.hub.scope.desk._viewers
        for one in viewers:
            one.outbox.credit = 0
        await other.send(json.dumps({"type": "credit", "bytes": 1 << 20}))

        async def granted() -> bool:
            return any(one.outbox.credit for one in viewers)

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


async def test_a_page_that_does_not_read_holds_up_nobody(hub: Any, fake_job: Any, until: Any) -> None:
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
            return len(hub.hub.scope.desk._viewers) == 1

        await until(let_go)
        dead.transport.abort()


NO_COMMANDS = (b"\0" * 64, "{", "[]", "7", '{"type": 7}', '{"type": "credit", "bytes": -1}', "x" * 5000, "[" * 3000)


async def test_what_is_no_command_is_told_and_ends_the_connection(hub: Any) -> None:
    for message in NO_COMMANDS:
        async with viewer(hub) as page:
            await receive(page)
            await page.send(message)
            refusal = await receive(page)
            assert (refusal.type, refusal.header["code"]) == (FrameType.ERROR, "bad-message")
            with pytest.raises(ConnectionClosed):
                await receive(page)
            assert page.close_code == 1008
    async with viewer(hub) as page:
        await page.send(json.dumps({"type": "of-a-newer-page"}))
        assert (await receive(page)).type == FrameType.SCOPE_HELLO


async def test_a_page_that_floods_is_let_go(hub: Any) -> None:
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


async def test_what_a_rank_says_wrongly_is_counted_and_harms_nobody(hub: Any, fake_job: Any, until: Any) -> None:
    wrong = [
        Frame(FrameType.SCOPE_PUBLISHER, {"rank": -1}),
        Frame(FrameType.SCOPE_RUN_STATE, {"run": RUN, "state": "dancing", "prompts": []}),
        Frame(FrameType.SCOPE_TOKENS, {"run": RUN, "step": 0, "rows": [[0]]}),
        Frame(FrameType.SCOPE_TOKENS, {"run": "none", "step": 0, "rows": [], "ids": []}),
    ]
    async with agents(hub, fake_job) as workers:
        for frame in wrong:
            await workers[0].send(frame.type, frame.header)
        await play(hub, workers, until=until)

        async def counted() -> bool:
            return bool(hub.hub.scope.desk.errors == len(wrong))

        await until(counted)


async def test_when_the_model_restarts_pages_are_told(hub: Any, fake_job: Any, until: Any) -> None:
    async with viewer(hub) as page:
        await receive(page)
        async with agents(hub, fake_job) as workers:
            await play(hub, workers, until=until)
            await until_done(page)
        said = await receive(page)
        assert (said.type, said.header["state"]) == (FrameType.SCOPE_STATE, "restarting")
        async with agents(hub, fake_job) as workers:
            await workers[0].send(FrameType.SCOPE_PUBLISHER, scope_session.publisher(recording().shape, 0, 1, 1).header)
            assert (await receive(page)).header["state"] == "ready"


# ---- HTTP


@pytest.fixture
def rank_zero(hub: Any) -> Iterator[scope_rank_zero.RankZero]:
    """A hub whose model answers."""
    token = derive(hub.secret, Role.SERVE)
    with scope_rank_zero.serve(scope_rank_zero.RankZero(recording(), token)) as rank:
        hub.hub.scope.asker.client = ServeClient(rank.url, token)
        yield rank


Asked = Callable[..., Any]


@contextlib.asynccontextmanager
async def shown(hub: Any, fake_job: Any, until: Any, rank: Any = None) -> AsyncIterator[Any]:
    """A client of a hub that has seen the run; probes' answers come by the agent."""
    async with agents(hub, fake_job) as workers:
        if rank is not None:
            loop = asyncio.get_running_loop()

            def publish(frame: Frame) -> None:
                sent = workers[0].connection.send(frames.encode(frame))
                asyncio.run_coroutine_threadsafe(sent, loop)

            rank.publish = publish
        await play(hub, workers, until=until)
        async with hub.client() as client:
            client.headers.update(bearer(hub, Role.CONTROLLER))
            yield client


async def brought(client: Any, path: str, **how: Any) -> Any:
    """The answer once the probe has brought it."""
    async with asyncio.timeout(20):
        while (answer := await client.get(path, **how)).status_code == 202:
            assert answer.json()["retryMs"] > 0
            await asyncio.sleep(0.02)
    return answer


async def test_runs_are_told(hub: Any, fake_job: Any, until: Any) -> None:
    async with shown(hub, fake_job, until) as client:
        assert (await client.get("/api/v1/scope")).json()["role"] == "controller"
        (summary,) = (await client.get(RUNS)).json()
        assert (summary["run"], summary["state"]) == (RUN, "done")
        detail = (await client.get(f"{RUNS}/{RUN}")).json()
        came = [[token["id"] for token in sample] for sample in detail["generated"]]
        assert came == recording().generated
        assert detail["generated"][0][0]["position"] == len(recording().prompts[0])
        assert detail["prompts"][0]["offsets"][8:10] == [None, [8, 9]]
        answer = await client.get(f"{RUNS}/nothing")
        assert (answer.status_code, answer.json()["code"]) == (404, "no-such-run")


async def test_tiles_are_the_models_attention(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        pinned = await client.get(f"{RUNS}/{RUN}/attention/0/1/2/0/0/0")
        assert pinned.status_code == 200
        sites = [body["sites"][0]["site"] for _, path, body in rank_zero.asked if path == "probes"]
        assert "attention" not in sites, "a pinned head needs no probe"
        answer = await brought(client, f"{RUNS}/{RUN}/attention/1/2/3/0/0/0")
        expected = scope_session.codes_of(recording().sites[1]["attention"][2, 3])
        assert answer.headers["x-tile-shape"] == f"{len(expected)},{len(expected)}"
        assert answer.content == expected.tobytes()
        assert "immutable" in answer.headers["cache-control"]
        etag = answer.headers["etag"]
        again = await client.get(f"{RUNS}/{RUN}/attention/1/2/3/0/0/0", headers={"If-None-Match": etag})
        assert (again.status_code, again.content) == (304, b"")
        coarse = await client.get(f"{RUNS}/{RUN}/attention/1/2/3/3/0/0")
        assert max(coarse.content) == expected.max()
        for outside in ("1/2/3/0/1/0", "1/2/9/0/0/0", "1/9/3/0/0/0", "5/2/3/0/0/0"):
            assert (await client.get(f"{RUNS}/{RUN}/attention/{outside}")).json()["code"] == "outside"


async def test_exact_numbers_in_three_forms(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        path = f"{RUNS}/{RUN}/values"
        expected = recording().sites[0]["residual"][:, 2]
        answer = await brought(client, f"{path}/residual?layer=2&format=npy")
        np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), expected)
        said = (await client.get(f"{path}/residual?layer=2&position=3")).json()
        assert (said["positions"], np.float32(said["values"][0]).tolist()) == ([3], expected[3].tolist())
        lines = (await client.get(f"{path}/residual?layer=2&format=csv")).text.splitlines()
        assert [np.float32(one) for one in lines[1].split(",")[1:]] == list(expected[0])
        asked = len(rank_zero.asked)
        exact = np.load(io.BytesIO((await brought(client, f"{path}/attention?layer=0&head=1&format=npy")).content))
        np.testing.assert_array_equal(exact, recording().sites[0]["attention"][0, 1])
        logits = np.load(io.BytesIO((await brought(client, f"{path}/logits?format=npy&sample=1")).content))
        np.testing.assert_array_equal(logits, recording().sites[1]["logits"])
        keys = np.load(io.BytesIO((await brought(client, f"{path}/k?layer=3&head=1&format=npy")).content))
        np.testing.assert_array_equal(keys, recording().sites[0]["k"][:, 3, 1])
        assert len(rank_zero.asked) == asked + 3
        for wrong, code in (
            ("residual", 422),
            ("residual?layer=9", 404),
            ("k?layer=0&head=2", 404),
            ("logits?layer=1", 422),
            ("soul", 404),
            ("residual?layer=0&position=99", 404),
        ):
            assert (await client.get(f"{path}/{wrong}")).status_code == code


async def test_pca_is_fitted_on_the_first_prompt_and_refits_keep_the_axes(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:

        async def based() -> bool:
            return any(path == "basis" for _, path, _ in rank_zero.asked)

        await until(based)
        bases = next(body for _, path, body in rank_zero.asked if path == "basis")
        axes = {tensor.name: tensor.data for tensor in unpack(bases)}["basis"]
        assert axes.shape == (4, 8, recording().shape.hidden)
        answer = await client.post(f"{RUNS}/{RUN}/pca", json={"layers": [0, 1, 2, 3], "refit": True})
        assert answer.status_code in {200, 202}

        async def refitted() -> bool:
            return sum(path == "basis" for _, path, _ in rank_zero.asked) == 2

        await until(refitted)
        newest = [body for _, path, body in rank_zero.asked if path == "basis"][-1]
        turned = {tensor.name: tensor.data for tensor in unpack(newest)}["basis"]
        assert np.einsum("lch,lch->lc", axes, turned)[:, 0].min() > 0.5


async def test_controlling_needs_the_role_and_a_model(hub: Any, fake_job: Any, until: Any) -> None:
    async with shown(hub, fake_job, until) as client:
        request = {"prompts": ["The sea "], "tokens": 4}
        bodies: dict[str, Any] = {"POST": request, "PATCH": {"capture": {}}, "DELETE": None}
        for method, path in CONTROL:
            body = {"layers": [0]} if path.endswith("pca") else bodies[method]
            refused = await client.request(method, path, json=body, headers=bearer(hub, Role.VIEWER))
            assert (refused.status_code, refused.json()["code"]) == (403, "needs-controller")
        for method, path in CONTROL[:3]:
            answer = await client.request(method, path, json=bodies[method])
            assert (answer.status_code, answer.json()["code"]) == (409, "no-model")
        for path in ("perturbations", "training"):
            for method in ("POST", "PATCH", "DELETE"):
                answer = await client.request(method, f"/api/v1/scope/{path}")
                assert (answer.status_code, answer.json()["code"]) == (501, "not-yet")


async def test_runs_go_on_to_the_model_and_its_refusals_come_back(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        request = {"prompts": ["The sea "], "tokens": 4, "capture": {"pinned": [{"layer": 1, "head": 2}]}}
        answer = await client.post(RUNS, json=request)
        assert (answer.status_code, answer.json()) == (201, {"run": RUN, "position": 0})
        sent = next(body for method, path, body in rank_zero.asked if (method, path) == ("POST", "runs"))
        assert sent["prompts"] == ["The sea "] and sent["capture"]["preset"] == "default"
        assert (await client.patch(f"{RUNS}/{RUN}", json={"capture": {"preset": "lite"}})).status_code == 204
        assert (await client.delete(f"{RUNS}/{RUN}")).status_code == 204
        door = {"X-Megatronapp-Caller": "jane@example.org"}
        assert (await client.delete(f"{RUNS}/{RUN}", headers=door)).status_code == 204
        actions = (await hub.get("/api/v1/summary"))["actions"]
        assert [(one["who"], one["what"]) for one in actions] == [
            ("controller token", f"started run {RUN} of 1 prompts"),
            ("controller token", f"changed what is captured of run {RUN}"),
            ("controller token", f"cancelled run {RUN}"),
            ("jane@example.org", f"cancelled run {RUN}"),
        ]
        assert actions[0]["at"].endswith("Z")
        ids = [one["id"] for one in actions]
        assert ids == sorted(set(ids))
        filters = {"expression": {"qkv": "__import__('os')"}}
        refused: list[dict[str, Any]] = [{"prompts": []}, request | {"capture": filters}]
        for wrong in [*refused, request | {"capture": {"pinned": [{"layer": 9, "head": 0}]}}]:
            answer = await client.post(RUNS, json=wrong)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
        rank_zero.refuse = (429, {"code": "queue-full", "message": "32 wait", "hint": "Wait."})
        answer = await client.post(RUNS, json=request)
        assert (answer.status_code, answer.json()) == (429, rank_zero.refuse[1])
        rank_zero.refuse = (500, {})
        assert (await client.post(RUNS, json=request)).json()["code"] == "model-failed"


async def test_a_model_that_is_away_is_told(hub: Any) -> None:
    hub.hub.scope.asker.client = ServeClient("http://127.0.0.1:9", "token")
    async with hub.client() as client:
        answer = await client.post(RUNS, json={"prompts": ["a"]}, headers=bearer(hub, Role.CONTROLLER))
        assert (answer.status_code, answer.json()["code"]) == (503, "restarting")


async def test_a_session_is_what_the_reference_writes(hub: Any, fake_job: Any, until: Any) -> None:
    async with shown(hub, fake_job, until) as client:
        answer = await client.get(f"{RUNS}/{RUN}/session")
        got = list(frames.split(answer.content))
        assert got[0].type == FrameType.SCOPE_HELLO
        prompts = [frame for frame in got if frame.type == FrameType.SCOPE_VALUES]
        assert [(one.header["layer"], one.header["head"]) for one in prompts] == [(1, 2), (3, 0)] * 2
        assert {one.header["tensors"][0]["c"] for one in prompts} == {"u8s"}
        assert [frame.type for frame in got[1 : -len(prompts)]] == [
            frame.type
            for frame in frames.split(scope_session.session(recording()))
            if frame.type not in {FrameType.SCOPE_HELLO, FrameType.SCOPE_VALUES, FrameType.SCOPE_PCA}
        ]
        assert threading.active_count() < 50
