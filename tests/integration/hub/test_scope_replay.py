"""Command `megatronapp scope replay` as users start it: the same routes, from a file; broken files give what they
hold."""

import asyncio
import contextlib
import functools
import io
import json
import pathlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import scope_session
import websocket_clients
from shared_tls import SHARED_TLS
from websockets.typing import Subprotocol

from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import SUBPROTOCOL

pytestmark = pytest.mark.asyncio
RUN = scope_session.RUN
DEADLINE_S = 120.0
RUNS = "/api/v1/scope/runs"
PROGRAM = pathlib.Path(sys.executable).parent / "megatronapp"


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=4)


@functools.cache
def recorded() -> bytes:
    return scope_session.session(recording())


@contextlib.asynccontextmanager
async def replayed(file: pathlib.Path, *arguments: str) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "scope", "replay", file, *arguments, stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            token = (await process.stdout.readline()).decode().split()[-1]
            url = (await process.stdout.readline()).decode().partition("/#code=")[0]
        async with httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=DEADLINE_S, verify=SHARED_TLS
        ) as client:
            await listening(client)
            yield client, process
    finally:
        process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()


async def listening(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(httpx.ConnectError):
                if (await client.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def page(client: httpx.AsyncClient) -> AsyncIterator[Any]:
    async with websocket_clients.connect(
        f"ws://{client.base_url.netloc.decode()}/api/v1/scope",
        additional_headers={"Authorization": client.headers["Authorization"]},
        subprotocols=[Subprotocol(SUBPROTOCOL)],
    ) as connection:
        assert connection.protocol.extensions == []
        yield connection


async def until_done(connection: Any) -> list[Frame]:
    got: list[Frame] = []
    while not (got and got[-1].type == FrameType.SCOPE_RUN and got[-1].header["state"] == "done"):
        got.append(frames.decode(await asyncio.wait_for(connection.recv(), DEADLINE_S)))
    return got


async def test_a_session_is_served_by_the_same_routes(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "one.scope"
    file.write_bytes(recorded())
    async with replayed(file, "--speed", "all") as (client, _):
        hello = (await client.get("/api/v1/scope")).json()
        assert (hello["source"], hello["state"], hello["model"]) == ("replay", "ready", recording().shape.model())
        async with page(client) as connection:
            await connection.send(json.dumps({"type": "resume", "run": RUN, "seq": 0}))
            got = (await until_done(connection))[1:]
        expected = [frame for frame in session_file.parse(recorded()).frames[1:] if frame.type != 48]
        assert [frame.type for frame in got] == [frame.type for frame in expected]
        assert [bytes(frame.body) for frame in got] == [bytes(frame.body) for frame in expected]
        exact = await client.get(f"{RUNS}/{RUN}/values/mlp1?layer=2&sample=1&format=npy")
        np.testing.assert_array_equal(np.load(io.BytesIO(exact.content)), recording().sites[1]["mlp1"][:, 2])
        tile = await client.get(f"{RUNS}/{RUN}/attention/1/2/3/0/0/0")
        codes = scope_session.codes_of(recording().sites[1]["attention"][2, 3]).astype(int)
        assert np.abs(np.frombuffer(tile.content, np.uint8).reshape(codes.shape).astype(int) - codes).max() <= 1
        refit = await client.post(f"{RUNS}/{RUN}/pca", json={"layers": [0, 3]})
        assert (refit.status_code, refit.json()) == (200, {"version": 2}), "of the file there is one already"
        answer = await client.post(RUNS, json={"prompts": ["a"]})
        assert (answer.status_code, answer.json()["code"]) == (409, "no-model")
        again = await client.get(f"{RUNS}/{RUN}/session")
        assert len(session_file.parse(again.content).frames) >= len(expected)


async def test_each_line_of_input_advances_a_single_step(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "one.scope"
    file.write_bytes(recorded())
    async with replayed(file, "--speed", "step") as (client, process), page(client) as connection:
        assert (await connection.recv())[5] == FrameType.SCOPE_HELLO
        for step in range(1, recording().steps):
            process.stdin.write(b"\n")
            frame = frames.decode(await asyncio.wait_for(connection.recv(), DEADLINE_S))
            while frame.type != FrameType.SCOPE_STEP:
                frame = frames.decode(await asyncio.wait_for(connection.recv(), DEADLINE_S))
            assert frame.header["step"] == step


@pytest.mark.full("test_scope_fuzz reads the intact beginnings of files")
async def test_the_intact_beginning_of_a_broken_file_is_shown(tmp_path: pathlib.Path) -> None:
    whole = session_file.parse(recorded())
    bare = [frame for frame in whole.frames if frame.type != FrameType.SCOPE_VALUES]
    data = b"".join(frames.encode(frame) for frame in bare)
    length = len(data) - 100
    file = tmp_path / "cut.scope"
    file.write_bytes(data[:length])
    async with replayed(file, "--speed", "all") as (client, process):
        detail = (await client.get(f"{RUNS}/{RUN}")).json()
        assert [len(sample) for sample in detail["generated"]] == [recording().steps] * 2
        answer = await client.get(f"{RUNS}/{RUN}/values/mlp1?layer=2")
        assert (answer.status_code, answer.json()["code"]) == (404, "not-recorded")
        message = (await asyncio.wait_for(process.stderr.readline(), DEADLINE_S)).decode()
        assert f"of {length}: frame" in message and f"{len(bare) - 1} frames before it were read" in message


@pytest.mark.full("cases that differ in the bytes", but=("text",))
@pytest.mark.parametrize(
    "data", [b"garbage that is no session at all", frames.encode(Frame(2, {}))], ids=["text", "frame"]
)
async def test_what_is_no_session_is_refused(tmp_path: pathlib.Path, data: bytes) -> None:
    file = tmp_path / "bad.scope"
    file.write_bytes(data)
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "scope", "replay", file, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, message = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 1
    assert message.decode().startswith("error: ") and "not a recorded session" in message.decode()
