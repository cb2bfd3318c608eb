"""The built page over HTTP: one HTML document that is requested each time, and assets named by their content."""

import pathlib

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from megatronapp_analyzer.web.problems import ApiError
from megatronapp_common.web.origin import (
    ASSET_HEADERS,
    ELSEWHERE_MARK,
    PAGE_HEADERS,
    add_meta_tags,
    can_open_localhost_name,
    is_route,
    is_same_site_navigation,
    loopback_alias,
)


def resolve(root: pathlib.Path, path: str) -> pathlib.Path | None:
    """Return the file under `root` that a URL path names, or None. Never leaves `root`, not even by links."""
    try:
        candidate = (root / path).resolve()
        return candidate if candidate.is_relative_to(root.resolve()) and candidate.is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def build_router(root: pathlib.Path, *, named: bool) -> APIRouter:
    """Return the routes of the page built into `root`.

    If `named`, names below `localhost` lead here alone, and browsers at a name that all servers of the node share are
    redirected to another. Otherwise they stay, because another server may answer to such a name.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/{path:path}")
    async def page(request: Request, path: str) -> Response:
        if path.startswith("api/"):
            raise ApiError(404, "not-found", f"there is no /{path}", "See /api/v1/openapi.json for what there is.")
        own = (
            loopback_alias(request.headers.get("host"), "hub")
            if named and can_open_localhost_name(request.headers)
            else None
        )
        if own is not None:
            return RedirectResponse(str(request.url.replace(netloc=own)), 307)
        return _file(root, path, () if is_same_site_navigation(request.headers) else (ELSEWHERE_MARK,))

    return router


def _file(root: pathlib.Path, path: str, marks: tuple[str, ...]) -> Response:
    """Return a file of the page; a path of plain words without a file is the page's own route."""
    found = resolve(root, path) if path else None
    if found is not None and found.suffix != ".html":
        return FileResponse(found, headers=ASSET_HEADERS if path.startswith("assets/") else PAGE_HEADERS)
    index = resolve(root, "index.html")
    if index is None or (found is None and not is_route(path)):
        raise ApiError(404, "not-found", f"there is no /{path}", "Build the page with `make setup`.")
    return HTMLResponse(add_meta_tags(index.read_text(encoding="utf-8"), *marks), headers=PAGE_HEADERS)
