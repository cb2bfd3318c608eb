"""Serves the built page, marked as the gateway's, and logs browsers in."""

import pathlib
from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.static_pages import login_page, page_response, read_login
from megatronapp_operator.gateway.access.authorization import Authorizer
from megatronapp_operator.gateway.access.credentials import Credentials
from megatronapp_operator.gateway.problems import count_error

MARK = '<meta name="megatronapp-server" content="gateway" />'
MAX_FORM_BYTES = 16 << 10
"""Tokens of a cluster are a few KiB."""
NO_PAGE = "This gateway serves no page; start it with --frontend."


def build_router(
    root: pathlib.Path | None, credentials: Credentials, gate_of: Callable[[Request], Authorizer]
) -> APIRouter:
    """Routes of the page and of logging in."""
    router = APIRouter(include_in_schema=False)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        shown = await read_login(request, MAX_FORM_BYTES, "gateway")
        try:
            return await credentials.log_in(request, shown, RedirectResponse("./", 303), gate=gate_of(request))
        except HttpError as error:
            count_error(request, error)
            return login_page(error.status, f"{error}.")

    @router.get("/{path:path}")
    async def page(request: Request, path: str) -> Response:
        return page_response(request, root, path, missing=NO_PAGE, mark=MARK)

    return router
