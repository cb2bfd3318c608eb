"""Middleware of the application: authentication and limits of requests.

Programs prove the `serve` token of the job as a Bearer header. Without a secret there is no token, and the server
listens on the loopback alone; then pages of other sites, which a local browser may show, are refused by their Origin,
and by their Host where a site lets its own name lead to this node, so that Origin and Host are the same (DNS
rebinding).
"""

import asyncio
import ipaddress
import os
import urllib.parse

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatronapp_common.names import Env
from megatronapp_common.web.origin import bearer_token, is_same_origin
from megatronapp_common.web.tokens import TokenRole, is_valid_token
from megatronapp_trainer.serve.problems import ApiError, error_response

OPEN = frozenset({"/healthz", "/readyz"})
"""Paths that need no token; a body sent to them is not read."""
KNOWN = "known"
"""Key in the state of an authenticated request. Its connection is closed after those of unauthenticated clients."""
MOST_BYTES = 4 << 20
LARGE = {("PUT", "/scope/v1/basis"): 64 << 20}
"""Paths with a larger limit of the body, in bytes: a frame of projections of all layers."""
BODY_S = 30.0


def _is_open(scope: Scope) -> bool:
    return scope["type"] != "http" or scope["path"] in OPEN


class TokenGuard:
    """Answers 401 without the token; without a secret, 421 under a foreign name, 403 to pages of other sites."""

    def __init__(self, app: ASGIApp, *, secret: str | None) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        refusal = self._refusal(scope)
        if refusal is None and not _is_open(scope):
            scope.setdefault("state", {})[KNOWN] = True
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if _is_open(scope):
            return None
        headers = Headers(scope=scope)
        if self._secret is None:
            return _foreign(headers)
        token = bearer_token(headers) or ""
        if token.isascii() and is_valid_token(self._secret, TokenRole.SERVE, token):
            return None
        command = f"megatronapp serve --print {os.environ.get(Env.JOB, 'JOB')}"
        hint = f"Send 'Authorization: Bearer <key>'; `{command}` prints the key."
        return ApiError(401, "unauthorised", "missing or wrong key", hint=hint)


def _foreign(headers: Headers) -> ApiError | None:
    """Return why a request is not from this node, or None."""
    host = headers.get("host")
    if host is not None and not is_local(host):
        hint = "Ask 127.0.0.1 or localhost; for other names serve with a key (`megatronapp serve`)."
        return ApiError(421, "other-host", "this server has no such name", hint=hint)
    if not is_same_origin(headers):
        return ApiError(403, "other-origin", "this request is from a page of another site")
    return None


def is_local(host: str) -> bool:
    """Return True if a Host header names this node in a way that no name server can assign to another."""
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class RequestLimit:
    """Limits the requests in work to `most` and answers 503 to more; routes for the server's state are exempt."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        self._app = app
        self._most = most
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        if _is_open(scope):
            await self._app(scope, receive, send)
            return
        if self._open >= self._most:
            error = ApiError(503, "too-many", f"{self._most} requests are being worked on", hint="Try again later.")
            await error_response(error)(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1


class BodyLimit:
    """Reads a body of at most 4 MiB (`LARGE`: more) within 30 s, whole, before it is handled; or answers 413, 408.

    On paths without a token it reads no body: the connection is closed after the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or answer it here."""
        if _is_open(scope):
            await self._app(scope, _replayed(b"", receive), _closing(send) if _has_body(scope) else send)
            return
        most = LARGE.get((scope["method"], scope["path"]), MOST_BYTES)
        try:
            async with asyncio.timeout(BODY_S):
                body = None if _declared_size(scope) > most else await _read(receive, most)
        except TimeoutError:
            await error_response(ApiError(408, "too-slow", f"the body took over {BODY_S:g} s"))(scope, receive, send)
            return
        if body is None:
            error = ApiError(413, "too-large", f"the body is over {most} bytes", hint="Send less at once.")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)


def _has_body(scope: Scope) -> bool:
    """Return True if the headers announce a body."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _closing(send: Send) -> Send:
    """Wrap `send` to close the connection after the answer."""

    async def close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return close


def _declared_size(scope: Scope) -> int:
    """Return the value of Content-Length; 0 without one."""
    told = Headers(scope=scope).get("content-length", "")
    return int(told) if told.isascii() and told.isdecimal() else 0


async def _read(receive: Receive, most: int) -> bytes | None:
    """Read the whole body; None if it is too large. An incomplete body of a disconnected client is not handled."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
