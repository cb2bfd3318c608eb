"""Requests to rank 0 that several pages wait for at once."""

import asyncio
from collections.abc import Coroutine, Hashable
from typing import Any, Generic, TypeVar

from megatronapp_analyzer.scope.parts.probe_tracker import RETRY_S
from megatronapp_common.web.problems import HttpError

MAX_REQUESTS = 8
"""Texts that are read at a time, of all pages, for one kind of request."""
Result = TypeVar("Result")


class PendingRequests(Generic[Result]):
    """Requests by key: pages that want the same result wait for one request."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Result]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tasks

    def begin(self, key: Hashable, request: Coroutine[Any, Any, Result]) -> None:
        """Begin a request. Call `check_limit` before the coroutine is made."""
        task = asyncio.ensure_future(request)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask again
        self._tasks[key] = task

    def check_limit(self) -> None:
        """Raise HttpError 429 where as many requests as may be are under way."""
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}
        if len(self._tasks) >= MAX_REQUESTS:
            message = "as many texts are read as the model takes at a time"
            raise HttpError(429, "too-many-probes", message, "Ask again once some are done.", retry_s=RETRY_S)

    async def result(self, key: Hashable, wait_s: float) -> Result | None:
        """Return the result of a request, which is forgotten then; None if it takes over `wait_s`.

        Raises what the request raises.
        """
        task = self._tasks[key]
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        if not done:
            return None
        if self._tasks.get(key) is task:  # another waiter may have forgotten it, and asked again
            del self._tasks[key]
        return task.result()

    async def close(self) -> None:
        """Cancel all requests that are under way."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
