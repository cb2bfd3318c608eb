"""The built page over HTTP: an HTML document that is requested each time, assets named by their content, and logins."""

import html
import pathlib
import re
import urllib.parse

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from megatronapp_common.web.body_limit import read_body
from megatronapp_common.web.origin import is_same_origin, is_same_site_navigation
from megatronapp_common.web.problems import WHERE, HttpError

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
ELSEWHERE_MARK = '<meta name="megatronapp-led-from" content="elsewhere" />'
"""Mark of a page that a link of another site opened: a code in its address may be foreign, and logs no user in."""
FORM_S = 10.0
"""Longest time in which a form must be received, in seconds."""
_FORM = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>MegatronApp: log in</title></head>
<body><p>{why}</p><form method="post" action="login">
<label>Token <input type="password" name="token" autocomplete="off" required></label> <button>Log in</button>
</form></body></html>
"""
_MAX_ROUTE = 256
_ROUTE = re.compile(r"[\w~-]+(?:/[\w~-]+)*/?", re.ASCII)


def page_response(request: Request, root: pathlib.Path | None, path: str, *, missing: str, mark: str = "") -> Response:
    """Return a file of the page built into `root`; a path of plain words without a file is the page's own route.

    `mark` is a tag that says to the page what serves it, `missing` a hint where no page is built. Raises HttpError 404.
    """
    if path.startswith("api/"):
        raise HttpError(404, "not-found", f"there is no /{path}", WHERE)
    found = resolve(root, path) if root is not None and path else None
    if found is not None and found.suffix != ".html":
        return FileResponse(found, headers=ASSET_HEADERS if path.startswith("assets/") else PAGE_HEADERS)
    index = None if root is None else resolve(root, "index.html")
    if index is None or (found is None and not is_route(path)):
        raise HttpError(404, "not-found", f"there is no /{path}", missing if index is None else WHERE)
    marks = mark + ("" if is_same_site_navigation(request.headers) else ELSEWHERE_MARK)
    page = index.read_text(encoding="utf-8").replace("<head>", f"<head>{marks}", 1)
    return HTMLResponse(page, headers=PAGE_HEADERS)


def resolve(root: pathlib.Path, path: str) -> pathlib.Path | None:
    """Return the file under `root` that a URL path names, or None. Never leaves `root`, not even by links."""
    try:
        candidate = (root / path).resolve()
        return candidate if candidate.is_relative_to(root.resolve()) and candidate.is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def is_route(path: str) -> bool:
    """Return true if a path without a file may be a route of the page: plain words and slashes, not too long."""
    return path == "" or (len(path) <= _MAX_ROUTE and _ROUTE.fullmatch(path) is not None)


async def read_login(request: Request, limit: int, server: str) -> str:
    """Return the token of a login form of at most `limit` bytes. Raises HttpError 403, 408 or 413."""
    if not is_same_origin(request.headers):
        raise HttpError(403, "other-origin", f"this form is not the {server}'s", f"Open the {server}'s own page.")
    body = await read_body(request.scope, request.receive, limit, seconds=FORM_S)
    return urllib.parse.parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip()


def login_page(status: int, why: str) -> Response:
    """Return a page that asks for a token once more, and says why."""
    return HTMLResponse(
        _FORM.format(why=html.escape(why)), status, headers=PAGE_HEADERS | {"Cache-Control": "no-store"}
    )
