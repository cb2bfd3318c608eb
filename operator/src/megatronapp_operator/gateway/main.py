"""Command line of `python -m megatronapp_operator.gateway`, the one entrance to the pages of all jobs of a cluster."""

import argparse
import asyncio
import contextlib
import logging
import pathlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from megatronapp_common.names import GATEWAY_PORT, HUB_PORT, ExitCode
from megatronapp_common.web import server
from megatronapp_common.web.bounded_http import STALL_S, BoundedHttpProtocol
from megatronapp_common.web.bounded_websocket import BoundedWebSocketProtocol
from megatronapp_operator.backends.kubernetes.client.api import connect
from megatronapp_operator.controller import probes
from megatronapp_operator.errors import BackendError, OperatorError
from megatronapp_operator.gateway import tls
from megatronapp_operator.gateway.app import GatewaySettings, create_app
from megatronapp_operator.gateway.gateway import CONTROLS, MAX_SOCKETS
from megatronapp_operator.gateway.metrics import GatewayMetrics
from megatronapp_operator.gateway.tls import Certificate
from megatronapp_operator.keys import KeyRing

log = logging.getLogger(__name__)

DESCRIPTION = "The one entrance to the pages of all jobs of a cluster."

MAX_MESSAGE_BYTES = 4 << 10
"""Limit of a page's message: the live socket receives none, MegaScope's receives credit and what the page missed."""
SHUTDOWN_S = 3
MAX_CONNECTIONS = 1_000
"""Then the plain port answers 503, and the TLS port closes connections. Live sockets have a limit of their own."""
TLS_PORT = 8443
METRICS_PORT = 8081
"""Port of metrics and liveness probe; network policies open it to Prometheus alone."""


def build_parser() -> argparse.ArgumentParser:
    """Flags of the gateway."""
    parser = argparse.ArgumentParser(prog="python -m megatronapp_operator.gateway", description=DESCRIPTION)
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=GATEWAY_PORT, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--metrics-port", type=int, default=METRICS_PORT, help="port of /metrics and /healthz (default: %(default)s)"
    )
    parser.add_argument(
        "--tls-port", type=int, default=TLS_PORT, help="port of the same pages over TLS (default: %(default)s)"
    )
    parser.add_argument("--tls-cert", type=pathlib.Path, help="certificate chain of --tls-port; none: no TLS")
    parser.add_argument("--tls-key", type=pathlib.Path, help="private key of --tls-cert")
    parser.add_argument(
        "--max-sockets", type=int, default=MAX_SOCKETS, help="live sockets that may be open (default: %(default)s)"
    )
    parser.add_argument(
        "--controls",
        type=int,
        default=CONTROLS,
        help="controlling calls of one caller to one job at once, and as many more in 15 s (default: %(default)s)",
    )
    parser.add_argument(
        "--key-file", type=pathlib.Path, required=True, help="file with the installation's keys, the newest first"
    )
    parser.add_argument("--watch-namespaces", default="", help="comma separated (default: all)")
    parser.add_argument(
        "--no-reviews", action="store_true", help="ask the cluster nothing about callers: only tokens of jobs work"
    )
    parser.add_argument("--frontend", type=pathlib.Path, help="folder of the built page; none is served if absent")
    parser.add_argument("--hub-port", type=int, default=HUB_PORT, help="port of hubs (default: %(default)s)")
    parser.add_argument("--kubeconfig", help="how to reach the cluster from outside of it")
    return parser


def listen(arguments: argparse.Namespace, flag: str, port: int) -> socket.socket:
    """A listening socket. Raises BackendError where the address cannot be had."""
    try:
        return server.listen(arguments.host, port, stall_s=STALL_S)
    except OSError as error:
        text = f"{flag} {port} at --host {arguments.host}: {error.strerror or error}; choose another one"
        raise BackendError(text) from error


def read_certificate(arguments: argparse.Namespace) -> Certificate | None:
    """Return the certificate of the TLS port; None without TLS. Raises BackendError."""
    if arguments.tls_cert is None and arguments.tls_key is None:
        return None
    if arguments.tls_cert is None or arguments.tls_key is None:
        given, missing = ("--tls-key", "--tls-cert") if arguments.tls_cert is None else ("--tls-cert", "--tls-key")
        raise BackendError(f"{given} needs {missing}; write both, or neither for a gateway without TLS")
    return Certificate(arguments.tls_cert, arguments.tls_key)


def page_config(app: ASGIApp) -> uvicorn.Config:
    """Return the settings of a server of the pages, whose lifespan the caller manages: two servers share it."""
    return server.server_config(
        app,
        shutdown_s=SHUTDOWN_S,
        http=BoundedHttpProtocol,
        ws=BoundedWebSocketProtocol,
        ws_max_size=MAX_MESSAGE_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        lifespan="off",
    )


@contextlib.asynccontextmanager
async def serving_tls(app: ASGIApp, arguments: argparse.Namespace, certificate: Certificate) -> AsyncIterator[None]:
    """Serve the pages over TLS, too, until the block ends. Raises BackendError."""
    server = probes.ProbeServer(page_config(app))
    listener = listen(arguments, "--tls-port", arguments.tls_port)
    log.info("pages over TLS at port %d", listener.getsockname()[1])
    async with certificate.followed(), tls.serving(server, listener, certificate, limit=MAX_CONNECTIONS):
        yield


@contextlib.contextmanager
def ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Let SIGTERM and SIGINT end a server, and nothing more: uvicorn would end the process before what is around it."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, server.handle_exit, number, None)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until a signal arrives. Raises OperatorError if the gateway cannot start."""
    certificate = read_certificate(arguments)
    settings = GatewaySettings(
        keys=KeyRing.read(arguments.key_file),
        namespaces=tuple(name for name in arguments.watch_namespaces.split(",") if name),
        reviews=not arguments.no_reviews,
        frontend=arguments.frontend,
        hub_port=arguments.hub_port,
        max_sockets=arguments.max_sockets,
        controls=arguments.controls,
    )
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    if certificate is not None:
        metrics.show_certificate(lambda: certificate.validity)
    probe_server = probes.create_server(probes.create_app(registry, alive=lambda: None, ready=lambda: None))
    with listen(arguments, "--port", arguments.port) as pages:
        async with (
            connect(kubeconfig=arguments.kubeconfig) as api,
            probes.serving(probe_server, listen(arguments, "--metrics-port", arguments.metrics_port)),
        ):
            app = create_app(api.guarded(lambda: None, metrics.count_api_request), settings, metrics)
            over_tls = contextlib.nullcontext() if certificate is None else serving_tls(app, arguments, certificate)
            server = probes.ProbeServer(page_config(app))
            async with app.router.lifespan_context(app), over_tls:
                with ended_by_signals(server):
                    await server.serve(sockets=[pages])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s gateway %(levelname)s %(message)s")
    try:
        asyncio.run(serve(arguments))
    except KeyboardInterrupt:
        return int(ExitCode.OK)
    except OperatorError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
    return int(ExitCode.OK)
