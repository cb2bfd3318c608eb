"""The agent's side: ranks at its socket, a bounded buffer, and what a new hub is told again."""

import asyncio
import contextlib
import pathlib
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.agent.scope import SOCKET, ScopeBuffer, ScopeSocket, Standing
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType

DEADLINE_S = 20.0
PART, TOKENS = FrameType.SCOPE_PART, FrameType.SCOPE_TOKENS


@given(st.lists(st.tuples(st.sampled_from([PART, TOKENS]), st.integers(1, 40)), max_size=60))
def test_tokens_outlive_parts_and_memory_is_bounded(items: list[tuple[int, int]]) -> None:
    buffer = ScopeBuffer(200)
    sent = [(kind, bytes([number]) * size) for number, (kind, size) in enumerate(items)]
    for kind, data in sent:
        buffer.push(kind, data)
    got = []
    while (popped := buffer.pop()) is not None:
        got.append(popped)
    assert sum(map(len, got)) <= 200 and len(got) + buffer.dropped == len(sent)
    assert got == [data for _, data in sent if data in got]
    if sum(len(data) for kind, data in sent if kind == TOKENS) <= 160:
        assert [data for kind, data in sent if kind == TOKENS and data not in got] == []


def framed(kind: int, **header: Any) -> bytes:
    return frames.encode(Frame(kind, header))


def test_a_new_hub_hears_who_publishes_and_what_goes_on() -> None:
    standing = Standing()
    for kind, header in (
        (FrameType.SCOPE_PUBLISHER, {"rank": 0}),
        (FrameType.SCOPE_PUBLISHER, {"rank": 1}),
        (FrameType.SCOPE_RUN_STATE, {"run": "1", "state": "queued"}),
        (FrameType.SCOPE_RUN_STATE, {"run": "2", "state": "queued"}),
        (FrameType.SCOPE_RUN_STATE, {"run": "1", "state": "decoding"}),
        (FrameType.SCOPE_RUN_STATE, {"run": "2", "state": "done"}),
    ):
        standing.note(Frame(kind, header), framed(kind, **header))
    standing.forget(1)
    told = [frames.decode(data) for data in standing.frames()]
    assert [frame.header for frame in told] == [{"rank": 0}, {"run": "1", "state": "decoding"}]
    for run in range(100):
        header = {"run": f"r{run}", "state": "queued"}
        standing.note(Frame(FrameType.SCOPE_RUN_STATE, header), framed(FrameType.SCOPE_RUN_STATE, **header))
    assert len(list(standing.frames())) == 33


@pytest.mark.asyncio
async def test_frames_of_ranks_pass_and_garbage_ends_its_connection_alone(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    woken = asyncio.Event()
    scope = ScopeSocket(folder, woken.set)
    async with asyncio.timeout(DEADLINE_S), scope.running():
        link = tmp_path / "short"
        link.symlink_to(folder)
        good = await rank(link / SOCKET)
        sent = [framed(FrameType.SCOPE_PUBLISHER, rank=0), framed(PART, step=0), framed(TOKENS, step=0)]
        for data in sent:
            good[1].write(data)
        got: list[bytes] = []
        while len(got) < len(sent):
            await woken.wait()
            woken.clear()
            while (popped := scope.pop()) is not None:
                got.append(popped)
        assert got == sent
        assert list(scope.standing.frames()) == sent[:1]
        for garbage in (b"\0" * 64, framed(FrameType.RECORDS, rank=0), b"GET / HTTP/1.1\r\n\r\n"):
            bad = await rank(link / SOCKET)
            bad[1].write(garbage)
            assert await bad[0].read() == b""
            await gone(bad)
        good[1].write(framed(PART, step=1))
        await woken.wait()
        assert scope.pop() == framed(PART, step=1)
        await gone(good)
        while list(scope.standing.frames()):
            await asyncio.sleep(0)
    assert not (folder / SOCKET).exists()


async def rank(path: pathlib.Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(path))


async def gone(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    streams[1].close()
    with contextlib.suppress(ConnectionError):
        await streams[1].wait_closed()


@pytest.mark.asyncio
async def test_a_socket_of_an_earlier_life_is_replaced_and_none_at_all_is_no_reason_to_end(
    tmp_path: pathlib.Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / SOCKET))
    async with ScopeSocket(tmp_path, lambda: None).running():
        heard = await rank(tmp_path / SOCKET)
        heard[1].write(b"\0" * 64)
        assert await heard[0].read() == b""
        await gone(heard)
    async with ScopeSocket(tmp_path / "nowhere", lambda: None).running():
        pass
