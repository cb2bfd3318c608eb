"""Web application of the hub: routes, guard and error answers."""

import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError

from megatronapp_analyzer.hub.http import (
    access,
    agent_socket,
    broadcast,
    pages,
    routes_faults,
    routes_health,
    routes_login,
    routes_read,
)
from megatronapp_analyzer.hub.http.history import routes as routes_history
from megatronapp_analyzer.hub.http.login import LoginService
from megatronapp_analyzer.hub.http.megascan import routes as routes_megascan
from megatronapp_analyzer.hub.http.timeline import routes as routes_timeline
from megatronapp_analyzer.hub.http.training import capture_routes, probe_routes, window_routes
from megatronapp_analyzer.hub.http.training import routes as routes_training
from megatronapp_analyzer.hub.metrics import build_registry
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.scope import routes as routes_scope
from megatronapp_analyzer.scope import routes_analysis, routes_comparison
from megatronapp_common.web import problems
from megatronapp_common.web.body_limit import BodyLimit
from megatronapp_common.web.guard import Guard
from megatronapp_common.web.security_headers import SecurityHeaders
from megatronapp_common.web.single_parameters import refuse_repeated_parameters

TITLE = "MegatronApp hub"
API_VERSION = "1"


def build_api(lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """Return all routes of the interface without a hub; enough to write the OpenAPI document."""
    app = FastAPI(
        title=TITLE,
        version=API_VERSION,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(refuse_repeated_parameters)],
    )
    problems.install(app, {RequestValidationError: problems.invalid_request})
    for module in (
        routes_health,
        routes_login,
        routes_read,
        routes_timeline,
        routes_history,
        routes_megascan,
        routes_faults,
        window_routes,
        routes_training,
        capture_routes,
        probe_routes,
        routes_scope,
        routes_analysis,
        routes_comparison,
        agent_socket,
        broadcast,
    ):
        app.include_router(module.router)
    return app


def create_app(hub: Hub, *, secret: str, frontend: pathlib.Path | None, named: bool = False) -> FastAPI:
    """Return the application that serves `hub`; it starts and stops the hub's tasks.

    `named`: names below `localhost` lead to this hub alone, so that its page may have one.
    """

    live = broadcast.LiveFeed(hub)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with hub.running(live.run):
            yield

    app = build_api(lifespan)
    app.state.hub, app.state.scope, app.state.live = hub, hub.scope, live
    app.state.registry = build_registry(hub)
    app.state.logins = logins = LoginService(secret, uid=hub.identity.uid)
    if frontend is not None:
        app.include_router(pages.build_router(frontend, named=named))
    app.add_middleware(BodyLimit, limit_of=access.limit_of)
    refusals = agent_socket.AgentRefusals(hub.totals)
    app.add_middleware(Guard, check=access.AccessCheck(secret=secret, logins=logins), on_refusal=refusals.note)
    app.add_middleware(SecurityHeaders)
    return app
