"""HTTP and WebSocket as uvicorn does them, with time limits so that no peer holds a connection or memory for nothing.

uvicorn waits without limit for the head of a request, and for a peer that reads nothing of what it requested.
"""

import asyncio
import socket

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from megatronapp_common.web.tcp_nodelay import set_tcp_nodelay

HEAD_S = 10.0
"""So long may the head of a request take."""
STALL_S = 30.0
"""So long may a peer not read while more than asyncio's high-water mark (64 KiB) waits for it."""
BACKLOG = 256
KERNEL_BYTES = 128 << 10
"""Limit of the kernel's buffer of a connection in one direction (the kernel doubles it); its default is up to 6 MiB."""


class _DeferredCall:
    """Does something later, unless it is stopped before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float, transport: asyncio.Transport) -> None:
        """Abort the connection after this time; a timer that already runs is left as it is."""
        if self._handle is None:
            self._handle = loop.call_later(seconds, transport.abort)

    def stop(self) -> None:
        """Leave the connection alone."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class _ReadDeadlineMixin(asyncio.Protocol):
    """A protocol whose peer must read what it is sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._stall, self._peer = _DeferredCall(), transport
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """Begin to wait for the peer to read."""
        super().pause_writing()
        self._stall.start(asyncio.get_running_loop(), STALL_S, self._peer)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stall.stop()
        super().connection_lost(exc)


class GatewayHttpProtocol(_ReadDeadlineMixin, H11Protocol):
    """HTTP: a request must arrive, and its answer must be read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        self._head = _DeferredCall()
        super().connection_made(transport)
        self._head.start(self.loop, HEAD_S, transport)

    def data_received(self, data: bytes) -> None:
        """Wait on only while no request is here; its pieces give it no more time."""
        super().data_received(data)
        moved = self.transport.get_protocol() is not self  # it is a WebSocket now
        if moved or (self.cycle is not None and not self.cycle.response_complete):
            self._head.stop()
        else:
            self._head.start(self.loop, HEAD_S, self.transport)

    def on_response_complete(self) -> None:
        """Wait for the next request; until its first byte arrives, uvicorn's own, shorter limit holds."""
        super().on_response_complete()
        self._head.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        super().connection_lost(exc)


class GatewayWebSocketProtocol(_ReadDeadlineMixin, WebSocketsSansIOProtocol):
    """WebSocket: a page must read its frames, and the answers to what it asks (ping)."""

    def handle_ping(self) -> None:
        """Answer a ping while the page reads: no other limit bounds its pings."""
        super().handle_ping()
        if not self.writable.is_set():
            self.transport.abort()


def listener(host: str, port: int) -> socket.socket:
    """A socket whose connections end by themselves when the peer takes no bytes. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.create_server((host, port), family=family, backlog=BACKLOG)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
    set_tcp_nodelay(made)
    return made


def hub_socket(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
    """Return a socket for a connection to a hub, which may send more than is read."""
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    made.setblocking(False)
    return made
