"""Limit of connections: a new one replaces one of an unauthenticated client, or one without a request.

uvicorn counts idle connections among those that make it refuse others. Here probes of /readyz are answered however many
connections there are.
"""

import asyncio

from megatronapp_common.web.bounded_http import BoundedHttpProtocol
from megatronapp_trainer.serve.middleware import KNOWN


class EvictingProtocol(BoundedHttpProtocol):
    """One connection of at most `most`; see `evicting`."""

    most = 1024
    stall_s = 60.0
    """Seconds for which a client may read nothing of its answer, besides what the kernel buffers. Longer than at the
    gateway, because clients are programs that may work on what they have read.
    """
    by_progress = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; above the limit one connection is closed (`_evict_connection`)."""
        self._was_known = False
        transport.set_write_buffer_limits(high=0)  # a stream has a few bytes per token: watch all of them
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) > self.most:
            self._evict_connection()

    def on_response_complete(self) -> None:
        """Wait for the next request of a client that may be authenticated."""
        if self.is_known:
            self._was_known, self._since = True, self.loop.time()
        super().on_response_complete()

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
        others = [other for other in self.connections if isinstance(other, EvictingProtocol) and other is not self]
        unknown = [other for other in others if not other.is_known]
        free = [other for other in others if other.is_free]
        oldest = min(unknown or free or [self], key=lambda connection: connection._since)
        self.connections.discard(oldest)
        oldest.transport.abort()


def evicting(most: int) -> type[EvictingProtocol]:
    """Return the protocol of a server with at most `most` connections."""
    return type("EvictingProtocol", (EvictingProtocol,), {"most": most})
