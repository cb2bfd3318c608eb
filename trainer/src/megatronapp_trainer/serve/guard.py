"""In front of the application: who may ask, and how much.

Programs prove the `serve` token of the job as a Bearer header. Without a secret there is no token, and the server
listens on this machine alone; then pages of other sites, which a browser here may show, are kept out by their Origin.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatronapp_common.browsers import bearer, same_origin
from megatronapp_common.tokens import Role, matches
from megatronapp_trainer.serve.problems import ApiError, error_response

OPEN = frozenset({"/healthz", "/readyz"})
MOST_BYTES = 4 << 20
BODY_S = 30.0


class TokenGuard:
    """Answers 401 without the token, 403 to a page of another site."""

    def __init__(self, app: ASGIApp, *, secret: str | None) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it here."""
        refusal = self._refusal(scope)
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            return None
        headers = Headers(scope=scope)
        if self._secret is None:
            if same_origin(headers):
                return None
            return ApiError(403, "other-origin", "this request comes from a page of another site")
        token = bearer(headers) or ""
        if token.isascii() and matches(self._secret, Role.SERVE, token):
            return None
        hint = "Send 'Authorization: Bearer <key>'; `megatronapp serve --print JOB` prints the key."
        return ApiError(401, "unauthorised", "missing or wrong key", hint=hint)


class BodyLimit:
    """Reads a body of at most 4 MiB within 30 s, whole, before anybody works on it; 413 and 408 for others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body in one piece, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_S):
                body = await _read(receive)
        except TimeoutError:
            await error_response(ApiError(408, "too-slow", f"the body took over {BODY_S:g} s"))(scope, receive, send)
            return
        if body is None:
            error = ApiError(413, "too-large", f"the body is over {MOST_BYTES} bytes", hint="Send fewer prompts.")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None where it is too large. What came before a client hung up is no body to work on."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
