"""Who may talk to the hub: tokens, cookie and origin, checked before any route is reached.

Agents prove the `agent` token; everybody else the `viewer` token, as a Bearer header or as the cookie that
`/?token=...` sets. A WebSocket that a browser opens must come from the hub's own page (Origin equals Host), because
browsers send cookies with cross-site WebSocket handshakes.
"""

import hashlib
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends
from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection, cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from megatronapp_analyzer.hub.problems import problem_response
from megatronapp_common.tokens import Role, derive, matches

if TYPE_CHECKING:
    from megatronapp_analyzer.hub.service import Hub
else:
    Hub = object  # FastAPI resolves the annotation below at run time and only needs the dependency

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
AGENT_PATH = "/api/v1/agent"
CLOSE_POLICY = 1008
"""WebSocket close code "policy violation" (RFC 6455, section 7.4.1)."""
LOGIN_TEXT = "This page needs the job's token. Open the address that `megatronapp ui NAME` prints.\n"


def hub_of(connection: HTTPConnection) -> "Hub":
    """The hub that serves this connection."""
    return cast("Hub", connection.app.state.hub)


HubOf = Annotated[Hub, Depends(hub_of)]


def cookie_name(secret: str) -> str:
    """Name of the viewer cookie; differs per job, because browsers share cookies between ports of one host."""
    return "megatronapp_" + hashlib.sha256(derive(secret, Role.VIEWER).encode()).hexdigest()[:12]


def bearer(headers: Mapping[str, str]) -> str | None:
    """Token of an `Authorization: Bearer` header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a WebSocket handshake comes from our own page, or from no page at all."""
    origin = headers.get("origin")
    return origin is None or urllib.parse.urlsplit(origin).netloc == headers.get("host")


class TokenGuard:
    """ASGI layer in front of the application. Refuses with 401, or closes a WebSocket with 1008."""

    def __init__(self, app: ASGIApp, *, secret: str) -> None:
        self._app = app
        self._secret = secret
        self._cookie = cookie_name(secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it here."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["type"] == "websocket":
            if self._websocket_allowed(scope["path"], headers):
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": CLOSE_POLICY, "reason": "wrong token or origin"})
            return
        response = self._answer_http(scope, headers)
        await (response or self._app)(scope, receive, send)

    def _websocket_allowed(self, path: str, headers: Headers) -> bool:
        if path == AGENT_PATH:
            return matches(self._secret, Role.AGENT, bearer(headers) or "")
        return same_origin(headers) and self._is_viewer(headers)

    def _is_viewer(self, headers: Headers) -> bool:
        token = bearer(headers) or cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        return matches(self._secret, Role.VIEWER, token)

    def _answer_http(self, scope: Scope, headers: Headers) -> Response | None:
        """An answer given here; None lets the request through."""
        token = QueryParams(scope["query_string"]).get("token") if scope["path"] == "/" else None
        if token is not None and matches(self._secret, Role.VIEWER, token):
            return self._log_in(token)
        if self._is_viewer(headers):
            return None
        if scope["path"].startswith("/api/"):
            hint = "Send 'Authorization: Bearer <viewer token>', or open the page once with ?token=<viewer token>."
            return problem_response(401, "unauthorised", "missing or wrong token", hint)
        return PlainTextResponse(LOGIN_TEXT, 401, headers={"Cache-Control": "no-store"})

    def _log_in(self, token: str) -> Response:
        response = RedirectResponse("/", 303, headers={"Cache-Control": "no-store"})
        response.set_cookie(self._cookie, token, httponly=True, samesite="strict", path="/")
        return response
