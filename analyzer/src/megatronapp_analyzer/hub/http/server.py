"""Settings of the hub's server."""

import uvicorn
from fastapi import FastAPI

from megatronapp_common.web.bounded_http import BoundedHttpProtocol
from megatronapp_common.web.server import server_config

MAX_MESSAGE_BYTES = 4 << 20
SHUTDOWN_S = 3


class HubHttpProtocol(BoundedHttpProtocol):
    """HTTP of a hub: an answer may have hundreds of megabytes (a trace), for which a slow link takes minutes."""

    by_progress = True


def build_server(app: FastAPI) -> uvicorn.Server:
    """Return a server that accepts messages of bounded size."""
    config = server_config(
        app,
        shutdown_s=SHUTDOWN_S,
        http=HubHttpProtocol,
        ws="websockets-sansio",  # slow pages are let go by their queues, and the gateway's pings must be answered
        ws_max_size=MAX_MESSAGE_BYTES,
    )
    return uvicorn.Server(config)
