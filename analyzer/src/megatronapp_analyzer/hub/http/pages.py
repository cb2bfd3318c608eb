"""The built page, and the name below `localhost` under which a browser opens it."""

import pathlib

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from megatronapp_common.web.origin import can_open_localhost_name, loopback_alias
from megatronapp_common.web.static_pages import page_response


def build_router(root: pathlib.Path, *, named: bool) -> APIRouter:
    """Return the routes of the page built into `root`.

    If `named`, names below `localhost` lead here alone, and browsers at a name that all servers of the node share are
    redirected to another. Otherwise they stay, because another server may answer to such a name.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/{path:path}")
    async def page(request: Request, path: str) -> Response:
        if named and not path.startswith("api/") and can_open_localhost_name(request.headers):
            own = loopback_alias(request.headers.get("host"), "hub")
            if own is not None:
                return RedirectResponse(str(request.url.replace(netloc=own)), 307)
        return page_response(request, root, path, missing="Build the page with `make setup`.")

    return router
