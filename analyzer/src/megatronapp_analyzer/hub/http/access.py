"""Access to the hub: tokens, cookie and origin, checked before any route of the interface is reached.

Agents prove the `agent` token; programs the `viewer` or `controller` token, as a Bearer header; browsers show the
cookie that `POST /login` sets. Routes find the role by `role_of`. A request that is allowed by a cookie must be sent
from the hub's own page, because browsers add cookies to the requests of any page (see
`megatronapp_common.web.origin`). The page itself holds nothing of the job and is open.
"""

from typing import Annotated, cast

from fastapi import Depends
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from megatronapp_analyzer.hub.http.login import LoginService
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.web.problems import problem_response
from megatronapp_analyzer.web.roles import ROLE, direct
from megatronapp_common.web.origin import READING, bearer_token, is_same_origin, is_same_site_navigation
from megatronapp_common.web.tokens import TokenRole, is_valid_token

API = "/api/"
AGENT_PATH = "/api/v1/agent"
CLOSE_POLICY = 1008
"""WebSocket close code "policy violation" (RFC 6455, section 7.4.1)."""
UNAUTHORISED = "Send 'Authorization: Bearer <viewer token>', or open the address that `megatronapp ui JOB` prints."


def hub_of(connection: HTTPConnection) -> Hub:
    """Return the hub that serves this connection."""
    return cast(Hub, connection.app.state.hub)


HubOf = Annotated[Hub, Depends(direct(hub_of))]


class TokenGuard:
    """ASGI layer in front of the application. Refuses with 401 or 403, or closes a WebSocket with 1008."""

    def __init__(self, app: ASGIApp, *, secret: str, logins: LoginService) -> None:
        self._app = app
        self._secret = secret
        self._logins = logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it here."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and not scope["path"].startswith(API)):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[ROLE] = role = self._role(scope, headers)
        if scope["type"] == "websocket":
            if role is not None and is_same_origin(headers):
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": CLOSE_POLICY, "reason": "wrong token or origin"})
            return
        refusal = _refusal(role, scope["method"], headers)
        await (refusal or self._app)(scope, receive, send)

    def _role(self, scope: Scope, headers: Headers) -> TokenRole | None:
        token = bearer_token(headers)
        if scope["type"] == "websocket" and scope["path"] == AGENT_PATH:
            return TokenRole.AGENT if is_valid_token(self._secret, TokenRole.AGENT, token or "") else None
        if token is not None:
            return self._logins.role_of_token(token)
        return self._logins.role_of_session(cookie_parser(headers.get("cookie", "")).get(self._logins.cookie, ""))


def _refusal(role: TokenRole | None, method: str, headers: Headers) -> Response | None:
    """Return the answer that refuses a request; None if the request is allowed."""
    if role is None:
        return problem_response(401, "unauthorised", "missing or wrong token", UNAUTHORISED)
    ours = is_same_site_navigation(headers) and (method in READING or is_same_origin(headers))
    if ours or bearer_token(headers) is not None:
        return None
    hint = "Open the page at the address that `megatronapp ui JOB` prints."
    return problem_response(403, "other-origin", "this request comes from a page that is not the hub's", hint)
