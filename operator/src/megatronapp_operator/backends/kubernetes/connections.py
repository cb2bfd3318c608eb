"""The TCP connections of one client session, closed when it ends.

aiohttp closes the connection of a cancelled request with a TLS goodbye, which waits up to 30 s for the server's answer,
and forgets the connection: closing the session neither waits for it nor aborts it. An event loop that ends meanwhile
leaves the socket open.
"""

import asyncio
import contextlib
import socket
import weakref
from typing import Any

CLOSE_S = 5.0
"""A socket that is shut down closes within a few turns of the event loop."""


class Connections:
    """Makes the sockets of a connector (its `socket_factory`) and closes those that it has left open."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def make(self, address: tuple[Any, ...]) -> socket.socket:
        """Create a socket for an address as `getaddrinfo` describes it."""
        made = socket.socket(*address[:3])
        self._sockets.add(made)
        return made

    async def close(self) -> None:
        """Close what is open, without waiting for the server. Call it when the session is closed."""
        for one in self._open():
            with contextlib.suppress(OSError):  # not connected any more
                one.shutdown(socket.SHUT_RDWR)  # its transport reads the end, and closes it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._open():
                    await asyncio.sleep(0.001)

    def _open(self) -> list[socket.socket]:
        return [one for one in self._sockets if one.fileno() >= 0]
