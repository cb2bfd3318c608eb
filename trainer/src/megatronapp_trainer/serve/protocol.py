"""How the server speaks HTTP: as uvicorn does, but nobody holds a connection for nothing.

uvicorn waits without end for the head of a request and for a client that reads nothing of its answer, and counts such
connections among those that make it refuse others. Here a head has a time, an answer must be read, and a connection on
which nothing is asked gives its place to one on which something may be: whoever probes /readyz is heard.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""So long may the head of a request take."""
STALL_S = 60.0
"""So long may a client not read while more than asyncio's high-water mark (64 KiB) waits for it."""


class BoundedProtocol(H11Protocol):
    """One connection of at most `most`; see `bounded`."""

    most = 1024

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; where there are too many, the oldest that asks nothing goes."""
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._since = self.loop.time()
        self._await_head()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Wait on only while no request is here; its pieces give it no more time."""
        super().data_received(data)
        if self.is_idle:
            self._await_head()
        else:
            self._forget_head()

    def on_response_complete(self) -> None:
        """Wait for the next request; as long as nothing of it comes uvicorn's own, shorter limit holds."""
        self._forget_head()
        super().on_response_complete()
        self._since = self.loop.time()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has."""
        super().resume_writing()
        self._forget_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._forget_head()
        self._forget_stall()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Nothing is asked, and nothing is on its way."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        idle = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.is_idle]
        oldest = min(idle, key=lambda one: one._since)  # this one at least is idle
        self.connections.discard(oldest)
        oldest.transport.abort()

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def bounded(most: int) -> type[BoundedProtocol]:
    """The protocol of a server with at most so many connections."""
    return type("Bounded", (BoundedProtocol,), {"most": most})
