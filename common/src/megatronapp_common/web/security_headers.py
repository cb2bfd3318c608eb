"""ASGI layer that adds headers to every answer, for all servers of ours. It needs no framework (ASGI 3)."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers against guessing of types, disclosure of addresses, embedding in other pages, and caching."""


class SecurityHeaders:
    """Layer that adds SAFE_HEADERS, and `more`, to answers whose route does not set them."""

    def __init__(self, app: App, more: Mapping[str, str] | None = None) -> None:
        self._app = app
        both = SAFE_HEADERS | dict(more or {})
        self._headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in both.items()]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass the request on to the application."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = list(message.get("headers", ()))
                names = {bytes(name).lower() for name, _ in said}
                message["headers"] = said + [pair for pair in self._headers if pair[0] not in names]
            await send(message)

        await self._app(scope, receive, send_with_headers)
