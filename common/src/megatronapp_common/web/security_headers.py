"""ASGI layer that adds headers to every answer, for all servers of ours."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

    def __init__(self, app: ASGIApp, more: Mapping[str, str] | None = None) -> None:
        self._app = app
        both = SAFE_HEADERS | dict(more or {})
        self._headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in both.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to the application."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                names = {bytes(name).lower() for name, _ in given}
                message["headers"] = given + [pair for pair in self._headers if pair[0] not in names]
            await send(message)

        await self._app(scope, receive, send_with_headers)
