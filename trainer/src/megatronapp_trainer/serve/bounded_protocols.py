"""HTTP protocol of the server: uvicorn's, with limits on the time and number of connections.

uvicorn waits without end for the head of a request and for a client that reads nothing of its answer, and counts such
connections among those that make it refuse others. Here a head has a time limit, an answer must be read, and a new
connection replaces one of an unauthenticated client (`middleware.KNOWN`), or one without a request, so that probes of
/readyz are answered.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from megatronapp_trainer.serve.middleware import KNOWN

HEAD_S = 10.0
"""Seconds until the head of a request must be complete."""
STALL_S = 60.0
"""Seconds for which a client may read nothing of its answer, besides what the kernel buffers."""


class BoundedProtocol(H11Protocol):
    """One connection of at most `most`; see `bounded`."""

    most = 1024

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; above the limit one connection is closed (`_evict_connection`)."""
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unread = 0
        self._was_known = False
        transport.set_write_buffer_limits(high=0)  # all buffered bytes are watched, not only those over 64 KiB
        super().connection_made(transport)
        self._since = self.loop.time()
        self._await_head()
        if len(self.connections) > self.most:
            self._evict_connection()

    def data_received(self, data: bytes) -> None:
        """Continue to wait only until the head of a request is complete; partial heads do not extend the time."""
        super().data_received(data)
        if self.is_idle:
            self._await_head()
        else:
            self._forget_head()

    def on_response_complete(self) -> None:
        """Wait for the next request; until its first byte uvicorn's own, shorter limit applies."""
        self._forget_head()
        if self.is_known:
            self._was_known, self._since = True, self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        if self._stall is None:
            self._await_reader()

    def resume_writing(self) -> None:
        """End the wait: the client has read."""
        super().resume_writing()
        self._forget_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of the connection."""
        self._forget_head()
        self._forget_stall()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Return True if there is no request, or its answer is complete."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_known(self) -> bool:
        """Return True if the client's present or last request was authenticated."""
        return self._was_known or (self.scope is not None and KNOWN in self.scope["state"])

    @property
    def is_free(self) -> bool:
        """Return True if there is no request, and all answers have been read."""
        return self.is_idle and not self.transport.get_write_buffer_size()

    def _evict_connection(self) -> None:
        """Close the oldest connection of an unauthenticated client, in any state; then of those that are free; then
        this one.
        """
        others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
        strangers = [one for one in others if not one.is_known]
        free = [one for one in others if one.is_free]
        oldest = min(strangers or free or [self], key=lambda one: one._since)
        self.connections.discard(oldest)
        oldest.transport.abort()

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._end_head)

    def _end_head(self) -> None:
        self._head = None
        if self.transport.get_write_buffer_size():
            self._await_head()  # it still reads the last answer
        else:
            self.transport.abort()

    def _await_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(STALL_S, self._end_stall)

    def _end_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._await_reader()
        else:
            self.transport.abort()

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def bounded(most: int) -> type[BoundedProtocol]:
    """Return the protocol of a server with at most `most` connections."""
    return type("Bounded", (BoundedProtocol,), {"most": most})
