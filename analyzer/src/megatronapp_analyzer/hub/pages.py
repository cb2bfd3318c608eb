"""Serves the built page: one HTML document that is asked for again each time, and assets named by their content."""

import pathlib

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from megatronapp_analyzer.hub.problems import ApiError

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Frame-Options": "DENY",
}
ASSET_HEADERS = {"Cache-Control": "public, max-age=31536000, immutable"}


def resolve(root: pathlib.Path, path: str) -> pathlib.Path | None:
    """The file under `root` that a URL path names, or None. Never leaves `root`, not even by links."""
    candidate = (root / path).resolve()
    inside = candidate.is_relative_to(root.resolve())
    return candidate if inside and candidate.is_file() else None


def build_router(root: pathlib.Path) -> APIRouter:
    """Routes of the page built into `root`; any path without a file and without a dot is the page's own route."""
    router = APIRouter(include_in_schema=False)

    @router.get("/{path:path}")
    async def page(path: str) -> Response:
        if path.startswith("api/"):
            raise ApiError(404, "not-found", f"there is no /{path}", "See /api/v1/openapi.json for what there is.")
        found = resolve(root, path) if path else None
        if found is not None:
            return FileResponse(found, headers=ASSET_HEADERS if path.startswith("assets/") else PAGE_HEADERS)
        index = resolve(root, "index.html")
        if index is None or "." in pathlib.PurePosixPath(path).name:
            raise ApiError(404, "not-found", f"there is no /{path}", "Build the page with `make setup`.")
        return FileResponse(index, headers=PAGE_HEADERS)

    return router
