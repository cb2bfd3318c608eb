"""Tasks that run while something is served."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any


@contextlib.asynccontextmanager
async def running(task: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Cancel a task at the end of the block, and wait for its end."""
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
