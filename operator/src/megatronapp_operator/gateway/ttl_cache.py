"""Answers that are stored for a few seconds; requests for what is being requested already wait for that answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import cachetools

Key = TypeVar("Key")
Value = TypeVar("Value")


class TtlCache(Generic[Key, Value]):
    """At most `size` answers of `load`, each for `ttl_s` from when it was requested. Failures are not stored."""

    def __init__(
        self,
        load: Callable[[Key], Awaitable[Value]],
        *,
        ttl_s: float,
        size: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._ttl_s = ttl_s
        self._clock = clock
        self._answers: cachetools.TTLCache[Key, tuple[float, asyncio.Future[Value]]] = cachetools.TTLCache(
            size, ttl_s, timer=clock
        )
        """Answers, and until when each is valid."""

    async def get(self, key: Key) -> Value:
        """Return the answer for `key`. Raises what `load` raises."""
        stored = self._answers.get(key)
        if stored is None or _failed(stored[1]):
            answer = asyncio.ensure_future(self._load(key))
            answer.add_done_callback(_failed)
            with self._answers.timer as now:  # the time of which the cache stores it
                stored = now + self._ttl_s, answer
                self._answers[key] = stored
        return await asyncio.shield(stored[1])

    async def next(self, key: Key) -> Value:
        """Return an answer that was requested after now; all that wait for it share one request."""
        stored = self._answers.get(key)
        if stored is not None:
            await asyncio.sleep(max(0.0, stored[0] - self._clock()))
        return await self.get(key)


def _failed(answer: "asyncio.Future[Value]") -> bool:
    """Return True if the request for the answer failed; reading its exception also marks it as retrieved."""
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
