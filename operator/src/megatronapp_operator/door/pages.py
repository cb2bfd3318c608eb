"""Serves the built page, tells it that this is a door, and logs browsers in."""

import asyncio
import html
import pathlib
import urllib.parse
from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from megatronapp_operator.door.access import Credentials, asked_here, opens_page, own_host, same_origin
from megatronapp_operator.door.gate import Gate
from megatronapp_operator.door.problems import WHERE, Refusal, tell

PAGE_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": PAGE_POLICY,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer browsers send `Origin: null` with a form
}
ASSET_HEADERS = {"Cache-Control": "public, max-age=31536000, immutable"}
MARK = '<meta name="megatronapp-server" content="door" />'
MAX_FORM_BYTES = 16 << 10
"""Tokens of a cluster are a few KiB."""
BODY_S = 10.0
"""So long may a body take."""
FORM = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>MegatronApp: log in</title></head>
<body><p>{why}</p><form method="post" action="/login">
<label>Token <input type="password" name="token" autocomplete="off" required></label> <button>Log in</button>
</form></body></html>
"""
ELSEWHERE = (
    "The link that led here is of another site and holds a token, which would log you in as somebody else. "
    "If it is yours, paste its address into the address bar, or log in with your own token:"
)
NO_PAGE = "This door serves no page; start it with --frontend.\n"


def resolve(root: pathlib.Path, path: str) -> pathlib.Path | None:
    """The file under `root` that a URL path names, or None. Never leaves `root`, not even by links."""
    try:
        candidate = (root / path).resolve()
        return candidate if candidate.is_relative_to(root.resolve()) and candidate.is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def build_router(root: pathlib.Path | None, credentials: Credentials, gate_of: Callable[[Request], Gate]) -> APIRouter:
    """Routes of the page and of logging in."""
    router = APIRouter(include_in_schema=False)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        if not same_origin(request.headers):
            raise Refusal(403, "other-origin", "this form is not the door's", "Open the door's own page.")
        fields = urllib.parse.parse_qs((await read_body(request, MAX_FORM_BYTES)).decode(errors="replace"))
        shown = fields.get("token", [""])[0].strip()
        try:
            return await credentials.log_in(request, shown, RedirectResponse("./", 303), gate=gate_of(request))
        except Refusal as refusal:
            tell(request, refusal)
            return _form(refusal.status, f"{refusal}.")

    @router.get("/{path:path}")
    async def page(request: Request, path: str) -> Response:
        if path.startswith("api/"):
            raise Refusal(404, "not-found", f"there is no /{path}", WHERE)
        named = own_host(request.headers.get("host")) if opens_page(request.headers) else None
        if named is not None:
            return RedirectResponse(str(request.url.replace(netloc=named)), 307)
        token = request.query_params.get("token") if path == "" else None
        if token is not None and not asked_here(request.headers):
            return _form(403, ELSEWHERE)
        if token is not None:
            there = RedirectResponse(_without_token(request), 303)
            try:
                await credentials.log_in(request, token, there, gate=gate_of(request))
            except Refusal as refusal:  # a ticket is good once: who is logged in already just sees the page
                tell(request, refusal)
            return there
        return _file(root, path)

    return router


def _form(status: int, why: str) -> Response:
    return HTMLResponse(FORM.format(why=html.escape(why)), status, headers=PAGE_HEADERS)


def _without_token(request: Request) -> str:
    rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
    return f"/?{urllib.parse.urlencode(rest)}" if rest else "/"


def _file(root: pathlib.Path | None, path: str) -> Response:
    """A file of the page; any path without a file and without a dot is the page's own route."""
    found = resolve(root, path) if root is not None and path else None
    if found is not None and found.suffix != ".html":
        return FileResponse(found, headers=ASSET_HEADERS if path.startswith("assets/") else PAGE_HEADERS)
    index = None if root is None else resolve(root, "index.html")
    if index is None or (found is None and "." in pathlib.PurePosixPath(path).name):
        raise Refusal(404, "not-found", f"there is no /{path}", NO_PAGE.strip() if index is None else WHERE)
    text = index.read_text(encoding="utf-8").replace("<head>", f"<head>{MARK}", 1)
    return HTMLResponse(text, headers=PAGE_HEADERS)


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request. Raises Refusal where it is longer than `limit` (413) or comes too slowly (408)."""
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, limit)
    except TimeoutError as error:
        raise Refusal(408, "too-slow", f"the body took more than {BODY_S:g} s", "Send it at once.") from error


async def _read(request: Request, limit: int) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise Refusal(413, "too-long", f"the body has more than {limit} bytes", "Send less.")
    return body
