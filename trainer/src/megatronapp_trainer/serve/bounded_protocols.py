"""How the server speaks HTTP: as uvicorn does, but nobody holds a connection for nothing.

uvicorn waits without end for the head of a request and for a client that reads nothing of its answer, and counts such
connections among those that make it refuse others. Here a head has a time, an answer must be read, and the connection
of a stranger (`guard.KNOWN`), else one on which nothing is asked, gives its place to a new one: whoever probes /readyz
is heard.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from megatronapp_trainer.serve.middleware import KNOWN

HEAD_S = 10.0
"""So long may the head of a request take."""
STALL_S = 60.0
"""So long may a client take nothing of what waits for it, beside what the kernel holds."""


class BoundedProtocol(H11Protocol):
    """One connection of at most `most`; see `bounded`."""

    most = 1024

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; where there are too many, one goes (`_make_room`)."""
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unread = 0
        self._was_known = False
        transport.set_write_buffer_limits(high=0)  # whatever waits here is watched, not only what is over 64 KiB
        super().connection_made(transport)
        self._since = self.loop.time()
        self._await_head()
        if len(self.connections) > self.most:
            self._evict_connection()

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
        if self.is_known:
            self._was_known, self._since = True, self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        if self._stall is None:
            self._await_reader()

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
        """Nothing is asked, or what was is answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_known(self) -> bool:
        """Who asks here was let through, now or when last something was asked."""
        return self._was_known or (self.scope is not None and KNOWN in self.scope["state"])

    @property
    def is_free(self) -> bool:
        """Nothing is asked, and all answers have been taken."""
        return self.is_idle and not self.transport.get_write_buffer_size()

    def _evict_connection(self) -> None:
        """End the oldest connection of a stranger, whatever it does; else of those that are free; else this one."""
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
    """The protocol of a server with at most so many connections."""
    return type("Bounded", (BoundedProtocol,), {"most": most})
