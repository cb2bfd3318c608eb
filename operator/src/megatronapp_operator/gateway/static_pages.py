"""Serves the built page, marked as the gateway's, and logs browsers in."""

import asyncio
import pathlib
import urllib.parse
from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from megatronapp_common.web.origin import (
    ASSET_HEADERS,
    ELSEWHERE_MARK,
    PAGE_HEADERS,
    add_meta_tags,
    is_route,
    is_same_origin,
    is_same_site_navigation,
    login_form,
)
from megatronapp_operator.gateway.authorization import Authorizer
from megatronapp_operator.gateway.credentials import Credentials
from megatronapp_operator.gateway.problems import WHERE, GatewayError, count_error

MARK = '<meta name="megatronapp-server" content="gateway" />'
MAX_FORM_BYTES = 16 << 10
"""Tokens of a cluster are a few KiB."""
BODY_S = 10.0
"""So long may a body take."""
NO_PAGE = "This gateway serves no page; start it with --frontend.\n"


def resolve(root: pathlib.Path, path: str) -> pathlib.Path | None:
    """The file under `root` that a URL path names, or None. Never leaves `root`, not even by links."""
    try:
        candidate = (root / path).resolve()
        return candidate if candidate.is_relative_to(root.resolve()) and candidate.is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def build_router(
    root: pathlib.Path | None, credentials: Credentials, gate_of: Callable[[Request], Authorizer]
) -> APIRouter:
    """Routes of the page and of logging in."""
    router = APIRouter(include_in_schema=False)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        if not is_same_origin(request.headers):
            raise GatewayError(403, "other-origin", "this form is not the gateway's", "Open the gateway's own page.")
        fields = urllib.parse.parse_qs((await read_body(request, MAX_FORM_BYTES)).decode(errors="replace"))
        shown = fields.get("token", [""])[0].strip()
        try:
            return await credentials.log_in(request, shown, RedirectResponse("./", 303), gate=gate_of(request))
        except GatewayError as refusal:
            count_error(request, refusal)
            return _form(refusal.status, f"{refusal}.")

    @router.get("/{path:path}")
    async def page(request: Request, path: str) -> Response:
        if path.startswith("api/"):
            raise GatewayError(404, "not-found", f"there is no /{path}", WHERE)
        return _file(root, path, () if is_same_site_navigation(request.headers) else (ELSEWHERE_MARK,))

    return router


def _form(status: int, why: str) -> Response:
    return HTMLResponse(login_form(why), status, headers=PAGE_HEADERS)


def _file(root: pathlib.Path | None, path: str, marks: tuple[str, ...]) -> Response:
    """A file of the page; plain words without a file are the page's own route."""
    found = resolve(root, path) if root is not None and path else None
    if found is not None and found.suffix != ".html":
        return FileResponse(found, headers=ASSET_HEADERS if path.startswith("assets/") else PAGE_HEADERS)
    index = None if root is None else resolve(root, "index.html")
    if index is None or (found is None and not is_route(path)):
        raise GatewayError(404, "not-found", f"there is no /{path}", NO_PAGE.strip() if index is None else WHERE)
    return HTMLResponse(add_meta_tags(index.read_text(encoding="utf-8"), MARK, *marks), headers=PAGE_HEADERS)


async def read_body(request: Request, limit: int) -> bytes:
    """Read a request's body. Raises GatewayError where it is longer than `limit` (413) or arrives too slowly (408)."""
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, limit)
    except TimeoutError as error:
        raise GatewayError(408, "too-slow", f"the body took more than {BODY_S:g} s", "Send it at once.") from error


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()  # to which small pieces are added without a copy of all that came before
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise GatewayError(413, "too-long", f"the body has more than {limit} bytes", "Send less.")
    return bytes(body)
