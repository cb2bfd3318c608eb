"""Idle peers hold no connection of a server: real sockets, short limits."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from megatronapp_common.web.body_limit import BodyLimit
from megatronapp_common.web.bounded_http import BoundedHttpProtocol, ReadDeadline
from megatronapp_common.web.bounded_websocket import BoundedWebSocketProtocol
from megatronapp_common.web.server import listen, server_config

LIMIT_S = 0.2
NEVER_S = 1000.0
DEADLINE_S = 120.0
HEAD = b"GET / HTTP/1.1\r\nHost: gateway\r\n"
UPGRADE = (
    HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
PING = b"\x89\xfd" + bytes(4) + b"x" * 125
CHUNK = b"x" * (1 << 20)
MANY = 64
"""Pieces, more than all buffers of the kernel hold."""
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_s", LIMIT_S)
    monkeypatch.setattr(ReadDeadline, "stall_s", LIMIT_S)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with more than the peer reads, or with little."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while scope["query_string"] == b"frames":
            await send({"type": "websocket.send", "bytes": CHUNK})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(MANY if scope["path"] == "/much" else 0):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": b"little"})


@contextlib.asynccontextmanager
async def served(handler: ASGIApp = application) -> AsyncIterator[Callable[[], Any]]:
    """A server with the protocols; gives what opens connections to it, with small buffers."""
    listener = listen("127.0.0.1", 0, stall_s=NEVER_S)
    config = server_config(
        handler,
        shutdown_s=3,
        http=BoundedHttpProtocol,
        ws=BoundedWebSocketProtocol,
        lifespan="off",
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))

    async def connect() -> Peer:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, listener.getsockname())
        return await asyncio.open_connection(sock=made, limit=1 << 14)

    try:
        yield connect
    finally:
        server.should_exit = True
        await task


async def end(peer: Peer) -> bytes:
    """Return what a peer receives until it is disconnected."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := await peer[0].read(1 << 16):
            received += data
    peer[1].close()
    with contextlib.suppress(ConnectionError):
        await peer[1].wait_closed()
    return received


def stop_reading(peer: Peer) -> None:
    """Leave all further bytes in the kernel."""
    transport = peer[1].transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()


@pytest.mark.asyncio
async def test_who_sends_no_whole_request_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(DEADLINE_S), served() as connect:
        silent, half = [await connect() for _ in range(2)]
        half[1].write(HEAD)
        assert await end(silent) == b""
        assert await end(half) == b""
        monkeypatch.setattr(BoundedHttpProtocol, "head_s", NEVER_S)
        whole = await connect()
        whole[1].write(HEAD + b"\r\n")
        assert (await end(whole)).startswith(b"HTTP/1.1 200")


@pytest.mark.asyncio
async def test_headers_sent_in_chunks_extend_no_time_limit() -> None:
    async with asyncio.timeout(DEADLINE_S), served() as connect:
        peer = await connect()
        ended = asyncio.ensure_future(end(peer))
        peer[1].write(HEAD)
        while not ended.done():
            peer[1].write(b"X: y\r\n")
            await asyncio.wait({ended}, timeout=LIMIT_S / 8)
        assert await ended == b""


@pytest.mark.asyncio
@pytest.mark.parametrize("is_slow", [False, True])
async def test_the_rest_of_a_refused_body_is_read_for_a_while(monkeypatch: pytest.MonkeyPatch, is_slow: bool) -> None:
    """A connection that is closed at once is reset while its peer sends, which then may not see the answer."""
    monkeypatch.setattr(BoundedHttpProtocol, "head_s", NEVER_S)
    head = HEAD.replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n" % (MANY << 20)
    async with asyncio.timeout(DEADLINE_S), served(BodyLimit(application, limit_of=lambda _: 1000)) as connect:
        peer = await connect()
        peer[1].write(head)
        assert (await peer[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
        if is_slow:
            monkeypatch.setattr(BoundedHttpProtocol, "head_s", LIMIT_S)
            ended = asyncio.ensure_future(end(peer))
            while not ended.done():
                peer[1].write(b"x")
                await asyncio.wait({ended}, timeout=LIMIT_S / 8)
        else:
            for _ in range(MANY):
                peer[1].write(CHUNK)
                await peer[1].drain()
            peer[1].write(HEAD + b"\r\n")
            assert b"HTTP/1.1 200" in await end(peer)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("head", "more"),
    [
        (HEAD.replace(b"/ ", b"/much ") + b"\r\n", b"\r\n"),
        (UPGRADE.replace(b"/ ", b"/?frames "), b"\x8a\x80" + bytes(4)),  # answers (pong) without a request
    ],
    ids=["http", "websocket"],
)
async def test_who_reads_nothing_is_let_go(head: bytes, more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_s", NEVER_S)
    async with asyncio.timeout(DEADLINE_S), served() as connect:
        peer = await connect()
        peer[1].write(head)
        with pytest.raises(ConnectionError):  # the only way to see an end without reading
            await peer[0].readexactly(16)
            stop_reading(peer)
            while True:
                peer[1].write(more)
                await peer[1].drain()
                await asyncio.sleep(LIMIT_S / 8)


@pytest.mark.asyncio
async def test_who_asks_without_reading_the_answers_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadDeadline, "stall_s", NEVER_S)
    monkeypatch.setattr(BoundedHttpProtocol, "head_s", NEVER_S)
    async with asyncio.timeout(DEADLINE_S), served() as connect:
        peer = await connect()
        peer[1].write(UPGRADE)
        assert b"101" in await peer[0].readuntil(b"\r\n\r\n")
        stop_reading(peer)
        with pytest.raises(ConnectionError):
            while True:
                peer[1].write(PING * 1000)
                await peer[1].drain()
