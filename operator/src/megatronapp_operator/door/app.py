"""The door's web application: routes, error answers and headers put together."""

import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatronapp_common.names import HUB_PORT
from megatronapp_operator.backends.kubernetes.api import Api
from megatronapp_operator.door import pages, problems, routes
from megatronapp_operator.door.access import Credentials, cookie_name
from megatronapp_operator.door.catalog import Catalog
from megatronapp_operator.door.gate import Gate
from megatronapp_operator.door.hubs import Hubs
from megatronapp_operator.door.relay import new_session
from megatronapp_operator.door.reviews import Reviews
from megatronapp_operator.door.sessions import Sessions

TITLE = "MegatronApp door"
API_VERSION = "1"
SAFE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DoorSettings:
    """What a door is started with."""

    key: str
    """The installation's key, 64 hex digits, from which the tokens of all jobs follow."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose jobs it shows; none: all."""
    reviews: bool = True
    """Whether it may ask the cluster who callers are and what they may do."""
    frontend: pathlib.Path | None = None
    """Folder of the built page."""
    hub_port: int = HUB_PORT


class SafeHeaders:
    """ASGI layer that adds SAFE_HEADERS wherever a route says nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SAFE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def build_api(lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """All routes of the interface without a cluster behind them; enough to write the OpenAPI document."""
    app = FastAPI(
        title=TITLE,
        version=API_VERSION,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    problems.install(app)
    for router in (routes.probes, routes.router, routes.sockets):
        app.include_router(router)
    return app


def create_app(api: Api, settings: DoorSettings) -> FastAPI:
    """The application that opens the jobs of a cluster."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        catalog = Catalog(api, key=settings.key, namespaces=settings.namespaces)
        async with new_session() as session:
            app.state.door = routes.Door(
                catalog=catalog,
                gate=Gate(catalog, Reviews(api) if settings.reviews else None),
                hubs=Hubs(api, port=settings.hub_port),
                credentials=credentials,
                session=session,
            )
            yield

    credentials = Credentials(Sessions(), cookie=cookie_name(settings.key))
    app = build_api(lifespan)
    app.include_router(pages.build_router(settings.frontend, credentials, lambda request: routes.door_of(request).gate))
    app.add_middleware(SafeHeaders)
    return app
