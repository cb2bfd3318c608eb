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
from starlette.types import Scope

from megatronapp_analyzer.hub.http.login import LoginService
from megatronapp_analyzer.hub.service import Hub
from megatronapp_common.web.origin import READING, bearer_token, is_own_page
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.roles import ROLE, direct
from megatronapp_common.web.tokens import TokenRole, is_valid_token

API = "/api/"
AGENT_PATH = "/api/v1/agent"
UNAUTHORISED = "Send 'Authorization: Bearer <viewer token>', or open the address that `megatronapp ui JOB` prints."
MAX_BODY_BYTES = 64 << 10
"""Limit of JSON that users and programs send."""
MAX_PROMPT_BYTES = 4 << 20
"""Limit of prompts, which only controllers send; rank 0 accepts no more."""
PROMPT_PATHS = frozenset(f"/api/v1/scope/{kind}" for kind in ("runs", "comparisons", "sweeps"))


def hub_of(connection: HTTPConnection) -> Hub:
    """Return the hub that serves this connection."""
    return cast(Hub, connection.app.state.hub)


HubOf = Annotated[Hub, Depends(direct(hub_of))]


class AccessCheck:
    """Check of the guard: which requests of which roles are allowed. Routes find the role under `ROLE`."""

    def __init__(self, *, secret: str, logins: LoginService) -> None:
        self._secret = secret
        self._logins = logins

    def __call__(self, scope: Scope) -> HttpError | None:
        """Return why a request is refused."""
        socket = scope["type"] == "websocket"
        if not socket and not scope["path"].startswith(API):
            return None
        headers = Headers(scope=scope)
        scope[ROLE] = role = self._role(scope, headers)
        if role is None:
            return HttpError(401, "unauthorised", "missing or wrong token", UNAUTHORISED)
        if is_own_page(headers, reads=not socket and scope["method"] in READING):
            return None
        if not socket and bearer_token(headers) is not None:
            return None
        hint = "Open the page at the address that `megatronapp ui JOB` prints."
        return HttpError(403, "other-origin", "this request was sent by a page that is not the hub's", hint)

    def _role(self, scope: Scope, headers: Headers) -> TokenRole | None:
        token = bearer_token(headers)
        if scope["type"] == "websocket" and scope["path"] == AGENT_PATH:
            return TokenRole.AGENT if is_valid_token(self._secret, TokenRole.AGENT, token or "") else None
        if token is not None:
            return self._logins.role_of_token(token)
        return self._logins.role_of_session(cookie_parser(headers.get("cookie", "")).get(self._logins.cookie, ""))


def limit_of(scope: Scope) -> int | None:
    """Return the number of bytes that the body of a request may have; None where no route reads one but by itself."""
    if not scope["path"].startswith(API) or scope["method"] in READING:
        return None
    prompts = scope["path"].rstrip("/") in PROMPT_PATHS and scope.get(ROLE) == TokenRole.CONTROLLER
    return MAX_PROMPT_BYTES if prompts else MAX_BODY_BYTES
