"""Where a hub listens, and how its server is set."""

import socket

import uvicorn
from fastapi import FastAPI

from megatronapp_analyzer.errors import SettingsError

MAX_MESSAGE_BYTES = 4 << 20
SHUTDOWN_S = 3


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises SettingsError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return sock


def server_of(app: FastAPI) -> uvicorn.Server:
    """A server that compresses nothing, logs no requests, and takes messages of bounded size."""
    config = uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return uvicorn.Server(config)
