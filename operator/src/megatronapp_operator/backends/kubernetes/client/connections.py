"""Tracks the TCP connections of one client session and closes them when it ends.

aiohttp closes the connection of a cancelled request with a TLS shutdown, which waits up to 30 s for the server's
answer, and forgets the connection: closing the session neither waits for it nor aborts it. An event loop that ends
meanwhile leaves the socket open.
"""

import asyncio
import contextlib
import logging
import socket
import weakref
from typing import Any

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds to close: a socket that is shut down closes within a few turns of the event loop."""


class SocketTracker:
    """Factory of the sockets of a connector (its `socket_factory`), which closes those that it has left open."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[_Socket] = weakref.WeakSet()

    def make(self, address: tuple[Any, ...]) -> socket.socket:
        """Create a socket for an address as `getaddrinfo` describes it."""
        made = _Socket(address)
        self._sockets.add(made)
        return made

    async def close(self) -> None:
        """Close open sockets, without waiting for the server. Call it after closing the session."""
        for connection in self._open():
            with contextlib.suppress(OSError):  # not connected any more
                connection.shutdown(socket.SHUT_RDWR)  # its transport reads the end, and closes it
        try:
            async with asyncio.timeout(CLOSE_S):
                for connection in self._open():
                    await connection.closed.wait()
        except TimeoutError:
            left = ", ".join(str(connection.remote) for connection in self._open())
            log.warning("connections still open %g s after the end of their session: %s", CLOSE_S, left)

    def _open(self) -> "list[_Socket]":
        return [connection for connection in self._sockets if connection.fileno() >= 0]


class _Socket(socket.socket):
    """Socket that reports its close. Its transport calls `close`."""

    def __init__(self, address: tuple[Any, ...]) -> None:
        super().__init__(*address[:3])
        self.remote, self.closed = address[4], asyncio.Event()

    def close(self) -> None:
        super().close()
        self.closed.set()
