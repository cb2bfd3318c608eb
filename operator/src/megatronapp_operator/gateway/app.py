"""The gateway's web application: routes, error answers and headers put together."""

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI

from megatronapp_common.names import HUB_PORT
from megatronapp_common.web.security_headers import SecurityHeaders
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.gateway import problems, routes, routes_scope, static_pages
from megatronapp_operator.gateway.access.authorization import Authorizer
from megatronapp_operator.gateway.access.credentials import Credentials, cookie_name
from megatronapp_operator.gateway.access.sessions import BrowserSessions
from megatronapp_operator.gateway.access.subject_access import AccessReviews
from megatronapp_operator.gateway.background import running
from megatronapp_operator.gateway.gateway import CONTROLS, MAX_SOCKETS, Gateway, concurrency_limits
from megatronapp_operator.gateway.job_catalog import JobCatalog
from megatronapp_operator.gateway.metrics import GatewayMetrics, RequestCounter
from megatronapp_operator.gateway.proxy.http_proxy import new_session
from megatronapp_operator.gateway.proxy.hub_addresses import HubAddresses
from megatronapp_operator.keys import KeyRing

TITLE = "MegatronApp gateway"
API_VERSION = "1"
API_POLICY = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox"}
"""Headers of all responses but the pages: the browser never runs or shows what a hub sends."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """Settings of a gateway process."""

    keys: KeyRing
    """The installation's keys, from which the tokens of all jobs follow."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose jobs it shows; none: all."""
    reviews: bool = True
    """True to check callers and their rights by reviews of the cluster."""
    frontend: pathlib.Path | None = None
    """Folder of the built page."""
    hub_port: int = HUB_PORT
    max_sockets: int = MAX_SOCKETS
    """Live sockets that may be open at a time."""
    controls: int = CONTROLS
    """Controlling calls of one caller to one job at once, and again in 15 s."""


def build_api(lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """Build all routes of the interface without a cluster; enough to write the OpenAPI document."""
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
    scope = (routes_scope.router, routes_scope.sockets)  # before what takes every path below a job
    for router in (*scope, routes.probes, routes.router, routes.sockets):
        app.include_router(router)
    return app


def create_app(api: KubernetesApi, settings: GatewaySettings, metrics: GatewayMetrics) -> FastAPI:
    """The application that opens the jobs of a cluster."""
    sockets = concurrency_limits("live sockets", settings.max_sockets)
    metrics.count_sockets(sockets.in_use, settings.max_sockets)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        catalog = JobCatalog(api, keys=settings.keys, namespaces=settings.namespaces)
        async with new_session() as session, running(asyncio.create_task(settings.keys.follow())):
            app.state.gateway = Gateway(
                catalog=catalog,
                gate=Authorizer(catalog, AccessReviews(api) if settings.reviews else None),
                hubs=HubAddresses(api, port=settings.hub_port),
                credentials=credentials,
                session=session,
                metrics=metrics,
                sockets=sockets,
                controls=settings.controls,
            )
            yield

    credentials = Credentials(BrowserSessions(), cookie=cookie_name(settings.keys.current))
    app = build_api(lifespan)
    app.include_router(
        static_pages.build_router(settings.frontend, credentials, lambda request: routes.gateway_of(request).gate)
    )
    app.state.refused = metrics.refused
    app.add_middleware(SecurityHeaders, more=API_POLICY)
    app.add_middleware(RequestCounter, metrics=metrics)
    return app
