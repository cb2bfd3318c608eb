"""WebSocket connections of tests, which end no sooner on a slow computer."""

from typing import Any

import websockets.asyncio.client

DEADLINE_S = 120.0


def connect(url: str, **settings: Any) -> websockets.asyncio.client.connect:
    """Connect without a proxy and without keepalive pings, whose answers would be late on a busy computer."""
    patient = {"open_timeout": DEADLINE_S, "close_timeout": DEADLINE_S, "ping_interval": None}
    return websockets.asyncio.client.connect(url, proxy=None, **patient | settings)
