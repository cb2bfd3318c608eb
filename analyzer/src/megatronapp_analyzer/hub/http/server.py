"""Settings of the hub's server."""

import uvicorn
from fastapi import FastAPI

from megatronapp_common.web.bounded_http import BoundedHttpProtocol
from megatronapp_common.web.bounded_websocket import BoundedWebSocketProtocol
from megatronapp_common.web.server import server_config

MAX_MESSAGE_BYTES = 4 << 20
SHUTDOWN_S = 3


def build_server(app: FastAPI) -> uvicorn.Server:
    """Return a server that accepts messages of bounded size."""
    config = server_config(
        app,
        shutdown_s=SHUTDOWN_S,
        http=BoundedHttpProtocol,
        ws=BoundedWebSocketProtocol,
        ws_max_size=MAX_MESSAGE_BYTES,
    )
    return uvicorn.Server(config)
