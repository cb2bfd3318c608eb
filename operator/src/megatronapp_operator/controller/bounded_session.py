"""HTTP session for kopf, whose answers have no more levels than Python can decode.

kopf decodes with `json`, which fails at about a thousand levels, and its watches end then. An API server stores up to
ten thousand, in managed fields and in fields of a pod template, as any author of a job may write them. Login handlers
of kopf may return a session of their own (`kopf.AiohttpSession`), and this one makes answers of a class of ours.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import kopf

from megatronapp_operator.backends.kubernetes.client.connections import SocketTracker
from megatronapp_operator.backends.kubernetes.client.decoding import LineBuffer, bound_depth

if TYPE_CHECKING:
    from aiohttp.connector import Connection


def open_session(info: kopf.ConnectionInfo, sockets: SocketTracker) -> kopf.AiohttpSession:
    """Open a session with these credentials, as kopf would. Its answers are without what lies below MAX_DEPTH levels.

    kopf closes it once the credentials are refused, and when it ends, but only if it has used it.
    """
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context(), socket_factory=sockets.make),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        response_class=BoundedResponse,
    )
    return kopf.AiohttpSession(
        server=info.server,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
        aiohttp_session=session,
    )


class BoundedResponse(aiohttp.ClientResponse):
    """Answer whose JSON is bounded in depth, as a document and as the lines of a watch."""

    async def start(self, connection: "Connection") -> aiohttp.ClientResponse:
        await super().start(connection)
        if self.url.query.get("watch") == "true":
            self.content = cast(aiohttp.StreamReader, BoundedLines(self.content))
        return self

    async def json(
        self,
        *,
        encoding: str | None = None,
        loads: Callable[[str], Any] = json.loads,
        content_type: str | None = "application/json",
    ) -> Any:  # noqa: ANN401 - as in aiohttp
        def bounded(text: str) -> Any:  # noqa: ANN401 - as in aiohttp
            return loads(bound_depth(text.encode()).decode())

        return await super().json(encoding=encoding, loads=bounded, content_type=content_type)


class BoundedLines:
    """Stream of a watch, of which `iter_chunked` gives whole lines. Other attributes are the stream's."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - attributes of the stream
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield the lines as they are completed, each bounded in depth.

        What follows the last line is dropped: a connection that is interrupted ends amid an event, which the next watch
        repeats.
        """
        buffer = LineBuffer()
        async for data in self._stream.iter_chunked(size):
            if lines := buffer.add(data):
                yield b"".join(bound_depth(line) + b"\n" for line in lines)
