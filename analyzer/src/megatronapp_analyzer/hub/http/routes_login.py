"""How browsers log in: by a code that is good once, or by a token."""

from typing import Any, cast

from fastapi import APIRouter, Request, status
from starlette.responses import RedirectResponse, Response

from megatronapp_analyzer.hub.http import schemas
from megatronapp_analyzer.hub.http.login import LIFE_S, LoginService
from megatronapp_common.web.loopback import is_another_user
from megatronapp_common.web.models import Problem
from megatronapp_common.web.origin import bearer_token
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.roles import role_of
from megatronapp_common.web.static_pages import login_page, read_login

MAX_FORM_BYTES = 4 << 10
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
        raise HttpError(403, "token-needed", "a cookie gives no codes", "Send 'Authorization: Bearer <viewer token>'.")
    return schemas.Code(code=login_service_of(request).codes.make(role_of(request)))


@router.post("/login", include_in_schema=False)
async def log_in(request: Request) -> Response:
    """Takes a form with one field, `token`: a code or a token of viewer or controller.

    A code is in the command line with which a browser is started, where other users of this computer can read it.
    """
    logins = login_service_of(request)
    is_stranger = is_another_user(request.scope.get("client"), request.scope.get("server"))
    session = logins.log_in(await read_login(request, MAX_FORM_BYTES, "hub"), takes_codes=not is_stranger)
    if session is None:
        return login_page(401, WRONG)
    there = RedirectResponse("./", 303)
    there.set_cookie(logins.cookie, session, max_age=LIFE_S, httponly=True, samesite="strict", path="/")
    return there
