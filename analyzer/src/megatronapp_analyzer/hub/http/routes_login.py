"""How browsers log in: by a code that is good once, or by a token."""

import asyncio
import urllib.parse
from typing import Any, cast

from fastapi import APIRouter, Request, status
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, RedirectResponse, Response

from megatronapp_analyzer.hub.http import schemas
from megatronapp_analyzer.hub.http.login import LIFE_S, LoginService
from megatronapp_analyzer.web.models import Problem
from megatronapp_analyzer.web.problems import NO_STORE, ApiError
from megatronapp_analyzer.web.roles import role_of
from megatronapp_common.web.origin import PAGE_HEADERS, bearer_token, is_same_origin, login_form

MAX_FORM_BYTES = 4 << 10
BODY_S = 10.0
"""So long may a form take."""
PROBLEMS: dict[int | str, dict[str, Any]] = {401: {"model": Problem}, 403: {"model": Problem}}
WRONG = (
    "This is no token of this job, and no code that is still good: a code opens the page once, within a minute. "
    "Ask for a fresh address by `megatronapp ui JOB`, or paste the job's viewer token:"
)

router = APIRouter()


def login_service_of(request: Request) -> LoginService:
    """The logins of the hub that serves this request."""
    return cast(LoginService, request.app.state.logins)


@router.post("/api/v1/codes", operation_id="addCode", status_code=status.HTTP_201_CREATED, responses=PROBLEMS)
async def add_code(request: Request) -> schemas.Code:
    """A code for an address that somebody opens soon, with the role of who asks: a program that shows its token."""
    if bearer_token(request.headers) is None:  # else a browser could prolong its login for ever
        raise ApiError(403, "token-needed", "a cookie gives no codes", "Send 'Authorization: Bearer <viewer token>'.")
    return schemas.Code(code=login_service_of(request).codes.make(role_of(request)))


@router.post("/login", include_in_schema=False)
async def log_in(request: Request) -> Response:
    """Takes a form with one field, `token`: a code or a token of viewer or controller."""
    if not is_same_origin(request.headers):
        raise ApiError(403, "other-origin", "this form is not the hub's", "Open the hub's own page.")
    fields = urllib.parse.parse_qs((await _read(request)).decode(errors="replace"))
    logins = login_service_of(request)
    session = logins.log_in(fields.get("token", [""])[0].strip())
    if session is None:
        return HTMLResponse(login_form(WRONG), 401, headers=PAGE_HEADERS | NO_STORE)
    there = RedirectResponse("./", 303, headers=NO_STORE)
    there.set_cookie(logins.cookie, session, max_age=LIFE_S, httponly=True, samesite="strict", path="/")
    return there


async def _read(request: Request) -> bytes:
    """The form. Raises ApiError where it is too long (413) or comes too slowly (408)."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM_BYTES:
                    raise ApiError(413, "too-long", f"the form has more than {MAX_FORM_BYTES} bytes", "Send less.")
    except (TimeoutError, ClientDisconnect) as error:
        raise ApiError(408, "too-slow", f"the form took more than {BODY_S:g} s", "Send it at once.") from error
    return body
