"""MegaScope from a rank's socket to a page: real agent, real hub, and a hub that is started again."""

import asyncio
import contextlib
import functools
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import scope_session
import websocket_clients
from websockets.typing import Subprotocol

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import Env
from megatronapp_common.scope.protocol import SOCKET, SUBPROTOCOL

pytestmark = pytest.mark.asyncio
RUN = scope_session.RUN
DEADLINE_S = 120.0


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=3)


@contextlib.asynccontextmanager
async def page(hub: Any) -> AsyncIterator[Any]:
    url = f"ws://127.0.0.1:{hub.port}/api/v1/scope"
    async with websocket_clients.connect(
        url, additional_headers=hub.bearer, subprotocols=[Subprotocol(SUBPROTOCOL)]
    ) as connection:
        yield connection


async def seen(connection: Any, state: str) -> list[Frame]:
    got: list[Frame] = []
    while not (got and got[-1].type == FrameType.SCOPE_RUN and got[-1].header["state"] == state):
        got.append(frames.decode(await asyncio.wait_for(connection.recv(), DEADLINE_S)))
    return got


async def connected(path: pathlib.Path) -> asyncio.StreamWriter:
    """Connect as a rank does, which tries again until the agent listens."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return (await asyncio.open_unix_connection(str(path)))[1]
            await asyncio.sleep(0.02)


async def test_frames_of_a_rank_reach_the_page_also_after_a_restart_of_the_hub(
    hub: Any, serve: Any, worker: Any, until: Any, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "run").mkdir()
    hub_worker = worker(hub.url)
    hub_worker.environment[str(Env.RUN_DIR.value)] = str(tmp_path / "run")
    hub_worker.open_rings()
    path = tmp_path / "run" / SOCKET
    sent = [frame for _, frame in scope_session.rank_frames(recording())]
    middle = next(place for place, frame in enumerate(sent) if frame.header.get("state") == "decoding") + 1
    async with hub_worker.agent() as process:
        writer = await connected(path)
        async with page(hub) as connection:
            for frame in sent[:middle]:
                writer.write(frames.encode(frame))
            got = await seen(connection, "decoding")
            assert [frame.header["ids"] for frame in got if frame.type == FrameType.SCOPE_STEP] == [
                [ids[0] for ids in recording().generated]
            ]

        def forget() -> None:
            core = hub.hub.scope.core
            core.__init__(core.settings)
            for link in hub.hub.links.values():
                link.replace(link)

        hub.server.call(forget)

        async def published_again() -> bool:
            return bool(hub.hub.scope.core.runs and hub.hub.scope.core.publishers.ranks)

        await until(published_again)
        async with page(hub) as connection:
            await connection.send(json.dumps({"type": "resume", "run": RUN, "seq": 0}))
            for frame in sent[middle:]:
                writer.write(frames.encode(frame))
            got = await seen(connection, "done")
            steps = [frame.header["step"] for frame in got if frame.type == FrameType.SCOPE_STEP]
            assert steps == list(range(1, recording().steps))
        writer.close()
        await writer.wait_closed()
        hub_worker.close_rings(unlink=True)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    assert not path.exists()
