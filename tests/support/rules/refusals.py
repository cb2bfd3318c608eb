"""Connections that nothing listens for, seen from the side that asks."""

import asyncio
from typing import Any

import pytest


def first_refusal(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a connection that was opened with asyncio has been refused."""
    connect, refused = asyncio.open_connection, asyncio.Event()

    async def connected(*place: Any, **how: Any) -> Any:
        try:
            return await connect(*place, **how)
        except ConnectionRefusedError:
            refused.set()
            raise

    monkeypatch.setattr(asyncio, "open_connection", connected)
    return refused
