"""The HTTP endpoint of worker 0: `GET /api/v1/launcher`, for the operator."""

import contextlib
import hmac
import http.server
import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

from megatronapp_common.names import Env
from megatronapp_trainer.errors import RendezvousError
from megatronapp_trainer.launch.rendezvous.gang_status import GangStatus

log = logging.getLogger(__name__)

PATH = "/api/v1/launcher"
SILENCE_S = 5.0
"""Seconds after which a silent connection is closed."""
MOST_CONNECTIONS = 16
"""Limit of concurrent connections; more are closed unanswered, so that no client can fill this process with threads."""


@contextlib.contextmanager
def serve_status(status: GangStatus, *, token: str, address: str, port: int) -> Iterator[int]:
    """Serve in background threads inside the context; yields the port.

    Raises RendezvousError if the port is taken.
    """
    try:
        server = _StatusServer((address, port), _StatusHandler)
    except OSError as error:
        raise RendezvousError(
            f"worker 0 cannot serve its status at {address or '*'}:{port}: {error.strerror}; "
            f"free the port or set {Env.STATUS_PORT} to another one"
        ) from error
    server.gang_status, server.token = status, token
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="status", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class _StatusServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    gang_status: GangStatus
    token: str

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the base class's lookup of a host name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Start a thread for the request, below the limit of connections."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Handle the request, and release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Log at debug level only: a client that disconnects is no event."""
        log.debug("a connection from %s ended", client_address, exc_info=True)


class _StatusHandler(http.server.BaseHTTPRequestHandler):
    timeout = SILENCE_S
    server_version = "megatronapp-launcher"
    sys_version = ""
    server: _StatusServer

    def do_GET(self) -> None:
        """Answer the status, to holders of the token."""
        if self.path.partition("?")[0] != PATH:
            self._answer(http.HTTPStatus.NOT_FOUND, {"detail": f"unknown path; this server has only {PATH}"})
        elif not self._known():
            self._answer(http.HTTPStatus.UNAUTHORIZED, {"detail": "needs Authorization: Bearer <viewer token>"})
        else:
            self._answer(http.HTTPStatus.OK, self.server.gang_status.document())

    def _known(self) -> bool:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.server.token.encode())

    def _answer(self, status: http.HTTPStatus, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        if status == http.HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the operator polls every few seconds, and this is the log of the job."""
        log.debug(format, *arguments)
