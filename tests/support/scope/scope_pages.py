"""Pages, agents and rank 0 around a real hub, and a run of the tiny model that everybody sees."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import scope_rank_zero
import scope_session
import websocket_clients

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import SUBPROTOCOL
from megatronapp_common.web.tokens import TokenRole, derive_token

RUN = scope_session.RUN
RUNS = "/api/v1/scope/runs"


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=4)


def bearer(hub: Any, role: TokenRole) -> dict[str, str]:
    return {"Authorization": f"Bearer {derive_token(hub.secret, role)}"}


@contextlib.asynccontextmanager
async def viewer(hub: Any, role: TokenRole = TokenRole.VIEWER, **how: Any) -> AsyncIterator[Any]:
    url = f"ws://127.0.0.1:{hub.port}/api/v1/scope"
    headers = bearer(hub, role) | how.pop("headers", {})
    how = {"subprotocols": [SUBPROTOCOL], "compression": None} | how
    async with websocket_clients.connect(url, additional_headers=headers, **how) as connection:
        yield connection


async def receive(connection: Any) -> Frame:
    return frames.decode(await asyncio.wait_for(connection.recv(), websocket_clients.DEADLINE_S))


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
        for frame in found:
            await frame.hello()
        yield found


async def play(hub: Any, workers: list[Any], *, until: Any, **layout: Any) -> None:
    """Send everything that ranks would, each by its own agent."""
    for rank, frame in scope_session.rank_frames(recording(), **layout):
        await workers[rank % len(workers)].connection.send(frames.encode(frame))

    async def arrived() -> bool:
        run = hub.hub.scope.core.runs.get(RUN)
        return run is not None and run.ended and all(len(found) == recording().steps for found in run.tokens)

    await until(arrived)


@contextlib.asynccontextmanager
async def shown(hub: Any, fake_job: Any, until: Any, rank: Any = None) -> AsyncIterator[Any]:
    """Yield a client of a hub that has seen the run; answers of probes are delivered by the agent."""
    async with agents(hub, fake_job) as workers:
        if rank is not None:
            rank.publish = scope_rank_zero.sender(workers[0].connection)
        await play(hub, workers, until=until)
        async with hub.client() as client:
            client.headers.update(bearer(hub, TokenRole.CONTROLLER))
            yield client


async def wait_for_pca_probes(hub: Any, rank: scope_rank_zero.RankZero, until: Any) -> None:
    """Wait for the hub's own probe, which is the first request."""

    async def probes_arrived() -> bool:
        return any(path == "probes" for _, path, _ in rank.requests) and len(hub.hub.scope.core.probes) == 1

    await until(probes_arrived)


async def fetched(client: Any, path: str, **how: Any) -> Any:
    """The answer once the probe has brought it."""
    async with asyncio.timeout(websocket_clients.DEADLINE_S):
        while (answer := await client.get(path, **how)).status_code == 202:
            assert answer.json()["retryMs"] > 0
            await asyncio.sleep(0.02)
    return answer
