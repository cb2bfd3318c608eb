"""Agent's side of MegaScope: ranks at its socket, a bounded buffer, and what is sent again to a new hub."""

import asyncio
import contextlib
import itertools
import pathlib
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.agent.scope import (
    LIMIT_BYTES,
    MAX_ENDED,
    MAX_RUNS,
    ScopeBuffer,
    ScopeResumeState,
    ScopeSocket,
    listening,
)
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import MAX_PART_BYTES, SOCKET

DEADLINE_S = 120.0
PART, TOKENS = FrameType.SCOPE_PART, FrameType.SCOPE_TOKENS


@given(st.lists(st.one_of(st.integers(1, 90), st.none()), max_size=60))
def test_pushes_to_a_full_buffer_wait_and_nothing_is_dropped(items: list[int | None]) -> None:
    async def pushed() -> None:
        buffer, sent, got = ScopeBuffer(200), list[bytes](), list[bytes | None]()
        for number, size in enumerate(items):
            if size is None:
                got.append(buffer.pop())
                continue
            waiting = asyncio.ensure_future(buffer.wait_for_space())
            await asyncio.sleep(0)
            assert waiting.done() == (buffer.held_bytes < 200)
            while not waiting.done():
                got.append(buffer.pop())
                await asyncio.sleep(0)
            sent.append(bytes([number]) * size)
            buffer.push(sent[-1])
            assert buffer.held_bytes < 200 + 90
        while (popped := buffer.pop()) is not None:
            got.append(popped)
        assert [data for data in got if data is not None] == sent

    asyncio.run(pushed())


@pytest.mark.asyncio
async def test_a_hub_that_takes_nothing_lets_ranks_wait_and_then_gets_all(tmp_path: pathlib.Path) -> None:
    scope = ScopeSocket(tmp_path, lambda: None)
    sent = [frames.encode(Frame(PART, {"part": number}, bytes(1 << 20))) for number in range(24)]
    async with asyncio.timeout(DEADLINE_S), scope.running():
        reader, writer = await rank(tmp_path / SOCKET)
        writer.write(b"".join(sent))
        while scope.buffer.held_bytes < LIMIT_BYTES:
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert scope.buffer.held_bytes < LIMIT_BYTES + len(sent[0])
        got: list[bytes] = []
        while len(got) < len(sent):
            if (popped := scope.pop()) is not None:
                got.append(popped)
            await asyncio.sleep(0)
        assert got == sent
        await wait_until_closed((reader, writer))


@pytest.mark.asyncio
async def test_a_part_that_is_too_large_leaves_a_mark_and_anything_else_its_connection(tmp_path: pathlib.Path) -> None:
    scope = ScopeSocket(tmp_path, lambda: None)
    async with asyncio.timeout(DEADLINE_S), scope.running():
        first = await rank(tmp_path / SOCKET)
        header = {"rank": 0, "run": "1", "step": 3, "rows": [[0, 1, 2]], "part": 1, "more": True}
        first[1].write(frames.encode(Frame(PART, header | {"tensors": [{"n": "q"}]}, bytes(MAX_PART_BYTES))))
        while (data := scope.pop()) is None:
            await asyncio.sleep(0)
        assert frames.decode(data).header == header | {"tensors": [], "dropped": True}
        assert bytes(frames.decode(data).body) == b""
        first[1].write(frames.encode(Frame(TOKENS, {"run": "1"}, bytes(MAX_PART_BYTES))))
        assert await first[0].read() == b""
        assert scope.pop() is None
        await wait_until_closed(first)


def framed(kind: int, **header: Any) -> bytes:
    return frames.encode(Frame(kind, header))


def test_a_new_hub_receives_the_publishers_and_unfinished_runs() -> None:
    standing = ScopeResumeState()
    for kind, header in (
        (FrameType.SCOPE_PUBLISHER, {"rank": 0}),
        (FrameType.SCOPE_PUBLISHER, {"rank": 1}),
        (FrameType.SCOPE_RUN_STATE, {"run": "1", "state": "queued"}),
        (FrameType.SCOPE_RUN_STATE, {"run": "2", "state": "queued"}),
        (FrameType.SCOPE_RUN_STATE, {"run": "1", "state": "decoding"}),
        (FrameType.SCOPE_RUN_STATE, {"run": "2", "state": "done"}),
        (FrameType.TRAINING_RANK, {"rank": 2, "every": 50}),
    ):
        standing.note(Frame(kind, header), framed(kind, **header))
    standing.note(Frame(FrameType.SCOPE_LEFT, {"rank": 1}), framed(FrameType.SCOPE_LEFT, rank=1))
    replayed = [frames.decode(data) for data in standing.frames()]
    done, unfinished = {"run": "2", "state": "done"}, {"run": "1", "state": "decoding"}
    assert [frame.header for frame in replayed] == [{"rank": 0}, {"rank": 2, "every": 50}, done, unfinished], (
        "the end may have been lost on its way"
    )
    for run, state in itertools.product(range(100), ("queued", "cancelled")):
        header = {"run": f"{state}{run}", "state": state}
        standing.note(Frame(FrameType.SCOPE_RUN_STATE, header), framed(FrameType.SCOPE_RUN_STATE, **header))
    assert len(list(standing.frames())) == 2 + MAX_RUNS + MAX_ENDED
    for rank in (0, 2):
        standing.note(Frame(FrameType.SCOPE_LEFT, {"rank": rank}), framed(FrameType.SCOPE_LEFT, rank=rank))
    states = [frames.decode(data).header["state"] for data in standing.frames()]
    assert states == ["cancelled"] * MAX_ENDED, "runs of a rank 0 that has gone do not go on"


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
            await wait_until_closed(bad)
        good[1].write(framed(PART, step=1))
        await woken.wait()
        assert scope.pop() == framed(PART, step=1)
        again = await rank(link / SOCKET)
        again[1].write(sent[0])
        while scope.pop() != sent[0]:
            await asyncio.sleep(0)
        await wait_until_closed(good)
        again[1].write(framed(PART, step=2))
        while (received := scope.pop()) is None:
            await asyncio.sleep(0)
        assert received == framed(PART, step=2), "a rank that has come back has not left"
        await wait_until_closed(again)
        while (received := scope.pop()) is None:
            await asyncio.sleep(0)
        assert received == framed(FrameType.SCOPE_LEFT, rank=0)
        assert not list(scope.standing.frames())
    assert not (folder / SOCKET).exists()


async def rank(path: pathlib.Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(path))


async def wait_until_closed(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    streams[1].close()
    with contextlib.suppress(ConnectionError):
        await streams[1].wait_closed()


def test_the_path_of_the_socket_appears_when_connections_are_accepted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Observed(socket.socket):
        def listen(self, *backlog: int) -> None:
            assert not (tmp_path / SOCKET).exists()
            super().listen(*backlog)

    monkeypatch.setattr(socket, "socket", Observed)
    with listening(tmp_path), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / SOCKET))
    assert [path.name for path in tmp_path.iterdir()] == [SOCKET]


@pytest.mark.asyncio
async def test_a_socket_of_an_earlier_life_is_replaced_and_none_at_all_is_no_reason_to_end(
    tmp_path: pathlib.Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / SOCKET))
    async with ScopeSocket(tmp_path, lambda: None).running():
        accepted = await rank(tmp_path / SOCKET)
        accepted[1].write(b"\0" * 64)
        assert await accepted[0].read() == b""
        await wait_until_closed(accepted)
    async with ScopeSocket(tmp_path / "nowhere", lambda: None).running():
        pass
