"""Middleware of the application: authentication and limits of requests.

Programs prove the `serve` token of the job as a Bearer header. Without a secret there is no token, and the server
listens on the loopback alone; then pages of other sites, which a local browser may show, are refused by their Origin,
and by their Host where a site lets its own name lead to this node, so that Origin and Host are the same (DNS
rebinding).
"""

import ipaddress
import os
import urllib.parse

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from megatronapp_common.names import Env
from megatronapp_common.web.origin import bearer_token, is_same_origin
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole, is_valid_token
from megatronapp_trainer.serve.problems import error_response

OPEN = frozenset({"/healthz", "/readyz"})
"""Paths that need no token; a body sent to them is not read."""
KNOWN = "known"
"""Key in the state of an authenticated request. Its connection is closed after those of unauthenticated clients."""
MOST_BYTES = 4 << 20
LARGE = {("PUT", "/scope/v1/basis"): 64 << 20}
"""Paths with a larger limit of the body, in bytes: a frame of projections of all layers."""


def _is_open(scope: Scope) -> bool:
    return scope["type"] != "http" or scope["path"] in OPEN


class TokenCheck:
    """Check of the guard: 401 without the token; without a secret, 421 under a foreign name, 403 to other sites."""

    def __init__(self, secret: str | None) -> None:
        self._secret = secret

    def __call__(self, scope: Scope) -> HttpError | None:
        """Return why a request is refused; note in its state that it is authenticated (`KNOWN`)."""
        if _is_open(scope):
            return None
        headers = Headers(scope=scope)
        error = _foreign(headers) if self._secret is None else self._without_token(self._secret, headers)
        if error is None:
            scope.setdefault("state", {})[KNOWN] = True
        return error

    def _without_token(self, secret: str, headers: Headers) -> HttpError | None:
        token = bearer_token(headers) or ""
        if token.isascii() and is_valid_token(secret, TokenRole.SERVE, token):
            return None
        command = f"megatronapp serve --print {os.environ.get(Env.JOB, 'JOB')}"
        hint = f"Send 'Authorization: Bearer <key>'; `{command}` prints the key."
        return HttpError(401, "unauthorised", "missing or wrong key", hint)


def _foreign(headers: Headers) -> HttpError | None:
    """Return why a request is not from this node, or None."""
    host = headers.get("host")
    if host is not None and not is_local(host):
        hint = "Ask 127.0.0.1 or localhost; for other names serve with a key (`megatronapp serve`)."
        return HttpError(421, "other-host", "this server has no such name", hint)
    if not is_same_origin(headers):
        return HttpError(403, "other-origin", "this request is from a page of another site")
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
            error = HttpError(503, "too-many", f"{self._most} requests are being worked on", "Try again later.")
            await error_response(error)(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1


def limit_of(scope: Scope) -> int:
    """Return how many bytes the body of a request may have; on paths without a token it is not read."""
    return 0 if _is_open(scope) else LARGE.get((scope["method"], scope["path"]), MOST_BYTES)
