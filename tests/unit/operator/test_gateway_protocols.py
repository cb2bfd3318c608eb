"""Idle peers hold no connection of the gateway: real sockets, short limits."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from megatronapp_operator.controller.probes import ProbeServer
from megatronapp_operator.gateway import bounded_protocols

LIMIT_S = 0.2
HEAD = b"GET / HTTP/1.1\r\nHost: gateway\r\n"
UPGRADE = (
    HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
PING = b"\x89\xfd" + bytes(4) + b"x" * 125
PIECE = b"x" * (1 << 20)
MANY = 64
"""Pieces, more than all buffers of the kernel hold."""
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocols, "HEAD_S", LIMIT_S)
    monkeypatch.setattr(bounded_protocols, "STALL_S", LIMIT_S)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with more than the peer reads, or with little."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while scope["query_string"] == b"frames":
            await send({"type": "websocket.send", "bytes": PIECE})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(MANY if scope["path"] == "/much" else 0):
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
    await send({"type": "http.response.body", "body": b"little"})


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Callable[[], Any]]:
    """The gateway's protocols; gives what opens connections to them, with small buffers."""
    listener = bounded_protocols.listener("127.0.0.1", 0)
    config = uvicorn.Config(
        application,
        http=bounded_protocols.GatewayHttpProtocol,
        ws=bounded_protocols.GatewayWebSocketProtocol,
        lifespan="off",
        log_config=None,
        timeout_keep_alive=1,
    )
    server = ProbeServer(config)
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
    heard = b""
    with contextlib.suppress(ConnectionError):
        while piece := await peer[0].read(1 << 16):
            heard += piece
    peer[1].close()
    with contextlib.suppress(ConnectionError):
        await peer[1].wait_closed()
    return heard


def stop_reading(peer: Peer) -> None:
    """Leave all further bytes in the kernel."""
    transport = peer[1].transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()


@pytest.mark.asyncio
async def test_who_sends_no_whole_request_is_let_go() -> None:
    async with asyncio.timeout(30), served() as connect:
        silent, half, whole = [await connect() for _ in range(3)]
        half[1].write(HEAD)
        whole[1].write(HEAD + b"\r\n")
        assert await end(silent) == b""
        assert await end(half) == b""
        assert (await end(whole)).startswith(b"HTTP/1.1 200")


@pytest.mark.asyncio
async def test_pieces_of_a_head_give_no_more_time() -> None:
    async with asyncio.timeout(30), served() as connect:
        peer = await connect()
        gone = asyncio.ensure_future(end(peer))
        peer[1].write(HEAD)
        while not gone.done():
            peer[1].write(b"X: y\r\n")
            await asyncio.wait({gone}, timeout=LIMIT_S / 8)
        assert await gone == b""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("asked", "more"),
    [
        (HEAD.replace(b"/ ", b"/much ") + b"\r\n", b"\r\n"),
        (UPGRADE.replace(b"/ ", b"/?frames "), b"\x8a\x80" + bytes(4)),  # answers (pong) without a request
    ],
    ids=["http", "websocket"],
)
async def test_who_reads_nothing_is_let_go(asked: bytes, more: bytes) -> None:
    async with asyncio.timeout(60), served() as connect:
        peer = await connect()
        peer[1].write(asked)
        await peer[0].readexactly(16)
        stop_reading(peer)
        with pytest.raises(ConnectionError):  # the only way to see an end without reading
            while True:
                peer[1].write(more)
                await peer[1].drain()
                await asyncio.sleep(LIMIT_S / 8)


@pytest.mark.asyncio
async def test_who_asks_without_reading_the_answers_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocols, "STALL_S", 1000.0)
    async with asyncio.timeout(60), served() as connect:
        peer = await connect()
        peer[1].write(UPGRADE)
        assert b"101" in await peer[0].readuntil(b"\r\n\r\n")
        stop_reading(peer)
        with pytest.raises(ConnectionError):
            while True:
                peer[1].write(PING * 1000)
                await peer[1].drain()


def test_the_end_of_an_answer_does_not_wait_for_the_peer() -> None:
    with (
        bounded_protocols.listener("127.0.0.1", 0) as sock,
        socket.create_connection(sock.getsockname()),
        sock.accept()[0] as one,
    ):
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
