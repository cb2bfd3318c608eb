"""Answers that are kept for a few seconds; who asks for what is being asked already waits for that answer."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class TtlCache(Generic[Key, Value]):
    """At most `size` answers of `load`, each for `ttl_s` from when it was asked for. Failures are not kept."""

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
        self._size = size
        self._clock = clock
        self._kept: OrderedDict[Key, tuple[float, asyncio.Future[Value]]] = OrderedDict()

    async def get(self, key: Key) -> Value:
        """The answer for `key`. Raises what `load` raises."""
        until, answer = self._kept.get(key, (float("-inf"), None))
        if answer is None or self._clock() >= until or _failed(answer):
            answer = asyncio.ensure_future(self._load(key))
            answer.add_done_callback(_failed)
            self._kept[key] = (self._clock() + self._ttl_s, answer)
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return await asyncio.shield(answer)

    async def next(self, key: Key) -> Value:
        """An answer that was asked for after now; for as many as wait for it, it is asked for once."""
        until, _ = self._kept.get(key, (float("-inf"), None))
        await asyncio.sleep(max(0.0, until - self._clock()))
        return await self.get(key)


def _failed(answer: "asyncio.Future[Value]") -> bool:
    """Return True if the request for the answer failed; reading its exception also marks it as retrieved."""
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
