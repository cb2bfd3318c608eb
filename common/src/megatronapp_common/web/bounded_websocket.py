"""WebSocket as uvicorn does it, with time limits. It needs the package `websockets`, which not every server has."""

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from megatronapp_common.web.bounded_http import ReadDeadline


class BoundedWebSocketProtocol(ReadDeadline, WebSocketsSansIOProtocol):
    """WebSocket: a peer must read its frames, and the answers to its pings."""

    def handle_ping(self) -> None:
        """Answer a ping while the peer reads: no other limit bounds its pings."""
        super().handle_ping()
        if not self.writable.is_set():
            self.transport.abort()
