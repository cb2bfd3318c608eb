"""Connections that nothing listens for, seen from the side that asks."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megatronapp_trainer.errors import RendezvousError


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


async def failure_with(reason: str, attempt: Callable[[float], Awaitable[object]]) -> str:
    """Return how an attempt fails at its deadline, which is longer where a slow computer needs it for this reason."""
    for timeout_s in (0.5, 8.0, 120.0):
        with pytest.raises(RendezvousError) as failure:
            await attempt(timeout_s)
        if re.search(reason, str(failure.value)):
            break
    return str(failure.value)
