"""The application, and the thread that serves it."""

import contextlib
import pathlib
import resource
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from megatronapp_common.web import server
from megatronapp_common.web.body_limit import BodyLimit
from megatronapp_common.web.guard import Guard
from megatronapp_common.web.security_headers import SecurityHeaders
from megatronapp_trainer.errors import RendezvousError, UsageError
from megatronapp_trainer.serve import problems, routes_health
from megatronapp_trainer.serve.connection_limit import EvictingProtocol, evicting
from megatronapp_trainer.serve.middleware import RequestLimit, TokenCheck, limit_of
from megatronapp_trainer.serve.openai import event_schemas, routes_openai, routes_tokens
from megatronapp_trainer.serve.request_broker import RequestBroker
from megatronapp_trainer.serve.scope import routes_comparison, routes_scope
from megatronapp_trainer.serve.scope.detached_runs import RunStore

API_VERSION = "1"
LOOPBACK = "127."
SHUTDOWN_S = 2
SPARE_REQUESTS = 64
"""Open requests beyond the prompts: lists, states, refused ones."""
SPARE_CONNECTIONS = 192
"""Connections beyond those with requests in work; a new one replaces the oldest without a request."""
SPARE_FILES = 256


def build_api() -> FastAPI:
    """Create the application with all routes and without a model."""
    app = FastAPI(title="MegatronApp serve", version=API_VERSION, docs_url=None, redoc_url=None)
    problems.install(app)
    for module in (routes_health, routes_openai, routes_tokens, routes_scope, routes_comparison):
        app.include_router(module.router)
    event_schemas.describe(app)
    return app


def create_app(broker: RequestBroker, *, secret: str | None) -> FastAPI:
    """Create the application in front of a broker; `app.state.model` is set once there is a model, under
    `app.state.opening`.
    """
    app = build_api()
    app.state.broker, app.state.model, app.state.runs = broker, None, RunStore(broker)
    app.state.opening = threading.Lock()
    app.state.most_requests = broker.most_open + SPARE_REQUESTS
    app.add_middleware(BodyLimit, limit_of=limit_of, answer=problems.error_response)
    app.add_middleware(RequestLimit, most=app.state.most_requests)
    app.add_middleware(Guard, check=TokenCheck(secret), answer=problems.error_response)
    app.add_middleware(SecurityHeaders)
    return app


def check_address(host: str, secret: str | None) -> None:
    """Raise UsageError for an address that other nodes reach if no access token is needed."""
    if secret is None and not host.startswith(LOOPBACK):
        raise UsageError(
            f"--host {host} lets other nodes connect, and without MEGATRONAPP_SECRET_FILE no token is needed; "
            "take 127.0.0.1, or `megatronapp serve`, which creates a secret"
        )


def listen(host: str, port: int, *, reserved: bool = False) -> socket.socket:
    """Return a listening socket. `reserved`: the backend has reserved the port for sockets of this user.

    Raises RendezvousError if the port is taken or the address not ours.
    """
    try:
        return server.listen(host, port, stall_s=EvictingProtocol.stall_s, reuse_port=reserved)
    except OSError as error:
        raise RendezvousError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error


@contextlib.contextmanager
def served(app: FastAPI, sock: socket.socket) -> Iterator[None]:
    """Serve in a background thread inside the context; at the end unfinished answers get 2 s."""
    connections = app.state.most_requests + SPARE_CONNECTIONS
    _allow_files(connections + SPARE_FILES)
    config = server.server_config(app, shutdown_s=SHUTDOWN_S, http=evicting(connections), ws="none", lifespan="off")
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, args=([sock],), name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        http.should_exit = True
        thread.join(SHUTDOWN_S + 1)
        sock.close()


def _allow_files(needed: int) -> None:
    """Raise the limit of open files to `needed`, as far as the system permits; each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == unlimited else min(needed, hard), hard))


def write_address(path: pathlib.Path, url: str) -> None:
    """Write the URL of the API to a temporary file and rename it."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(url + "\n", encoding="utf-8")
    draft.rename(path)
