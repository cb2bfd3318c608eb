"""Settings of the hub's server."""

import uvicorn
from fastapi import FastAPI

MAX_MESSAGE_BYTES = 4 << 20
SHUTDOWN_S = 3


def build_server(app: FastAPI) -> uvicorn.Server:
    """Return a server that compresses nothing, logs no requests, and accepts messages of bounded size."""
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
