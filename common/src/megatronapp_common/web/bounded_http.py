"""HTTP as uvicorn does it, with time limits so that no peer holds a connection or memory for nothing.

uvicorn waits without limit for the head of a request, and for a peer that reads nothing of what it requested.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

STALL_S = 30.0


class ReadDeadline(asyncio.Protocol):
    """Protocol whose peer must read what it is sent."""

    stall_s = STALL_S
    """Time in which a peer must read all but asyncio's low-water mark (16 KiB) once more than its high-water mark
    (64 KiB) waits for it.
    """
    by_progress = False
    """True: time in which a peer must read anything, as long as so much waits for it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, whose buffer the timer watches."""
        self._stall: asyncio.TimerHandle | None = None
        self._unread = 0
        self._peer = cast(asyncio.Transport, transport)  # uvloop's are not instances of it
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """Begin to wait for the peer to read."""
        super().pause_writing()
        if self._stall is None:
            self._await_reader()

    def resume_writing(self) -> None:
        """End the wait: the peer has read."""
        super().resume_writing()
        self._stop_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a lost connection."""
        self._stop_stall()
        super().connection_lost(exc)

    def _await_reader(self) -> None:
        self._unread = self._peer.get_write_buffer_size()
        self._stall = asyncio.get_running_loop().call_later(self.stall_s, self._end_stall)

    def _end_stall(self) -> None:
        if self.by_progress and self._peer.get_write_buffer_size() < self._unread:
            self._await_reader()
        else:
            self._peer.abort()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


class BoundedHttpProtocol(ReadDeadline, H11Protocol):
    """HTTP: a request must arrive, and its answer must be read."""

    head_s = 10.0
    """Time until the head of a request must be complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        self._head: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Continue to wait only until a request is complete; parts of its head do not extend the time."""
        super().data_received(data)
        upgraded = self.transport.get_protocol() is not self  # it is a WebSocket now
        if self.is_idle and not upgraded:
            self._await_head()
        else:
            self._stop_head()

    def on_response_complete(self) -> None:
        """Wait for the next request; until its first byte uvicorn's own, shorter limit applies."""
        self._stop_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of the connection."""
        self._stop_head()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Return true if there is no request, or its answer is complete."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self.head_s, self._end_head)

    def _end_head(self) -> None:
        self._head = None
        if self._stall is not None:
            self._await_head()  # it still reads the last answer, and must
        else:
            self.transport.abort()

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
