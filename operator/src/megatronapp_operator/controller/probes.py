"""Probes and metrics over HTTP. They need no rights."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from megatronapp_common.web.bounded_http import STALL_S
from megatronapp_common.web.server import listen, server_config
from megatronapp_operator.errors import SettingsError

log = logging.getLogger(__name__)

SHUTDOWN_S = 3
"""Seconds to finish answers. Then connections of scrapers that read nothing are closed."""

Check = Callable[[], str | None]
"""Returns why something is not well; None: it is."""


class ProbeServer(uvicorn.Server):
    """Server without signal handlers: the operator handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Metrics:
    """Endpoint of exactly one path: a mounted application answers the path without a slash by a redirect."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._app = make_asgi_app(registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_app(registry: CollectorRegistry, *, alive: Check, ready: Check) -> Starlette:
    """Return the application with /healthz, /readyz and /metrics."""
    return Starlette(
        routes=[
            Route("/healthz", _probe(alive)),
            Route("/readyz", _probe(ready)),
            Route("/metrics", _Metrics(registry)),
            Route("/metrics/", _Metrics(registry)),
        ]
    )


def _probe(check: Check) -> Callable[[Request], PlainTextResponse]:
    def answer(_request: Request) -> PlainTextResponse:
        problem = check()
        return PlainTextResponse("ok\n" if problem is None else f"{problem}\n", 200 if problem is None else 503)

    return answer


def create_server(app: Starlette) -> ProbeServer:
    """Return a server of the application."""
    return ProbeServer(server_config(app, shutdown_s=SHUTDOWN_S, lifespan="off"))


@contextlib.asynccontextmanager
async def run_server(server: ProbeServer, port: int) -> AsyncIterator[int]:
    """Serve on all addresses; yield the port. Raises SettingsError if it is in use.

    A kubelet probes a pod at its first address, which may be of IPv6.
    """
    try:
        listener = listen("::" if socket.has_dualstack_ipv6() else "0.0.0.0", port, stall_s=STALL_S)
    except OSError as error:
        raise SettingsError(f"--port {port}: {error.strerror}; choose another one") from error
    found = int(listener.getsockname()[1])
    log.info("metrics and probes at port %d", found)
    async with serving(server, listener):
        yield found


@contextlib.asynccontextmanager
async def serving(server: ProbeServer, listener: socket.socket) -> AsyncIterator[None]:
    """Serve at a listening socket, which is closed at the end."""
    with listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await task
