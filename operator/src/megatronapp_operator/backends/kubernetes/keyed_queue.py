"""Queue of keys: many requests to reconcile a job become one reconcile, and no job is reconciled twice at a time.

The rules are those of client-go's workqueue: a key that is added while it waits is queued once; a key that is added
while it is processed is queued again when that is done.
"""

import asyncio
import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

SPARE = 1024
"""Replaced times that the heap may have before it is built again."""
Key = TypeVar("Key", bound=Hashable)


class KeyedQueue(Generic[Key]):
    """Queue for one event loop. `clock` gives seconds that never decrease."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ready: dict[Key, float] = {}
        """Waiting keys, in order, and since when they wait."""
        self._busy: set[Key] = set()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def depth(self) -> int:
        """Number of keys that wait to be taken now."""
        return len(self._ready)

    @property
    def oldest_s(self) -> float:
        """Seconds that the first key has waited; 0 without keys."""
        since = next(iter(self._ready.values()), None)
        return 0.0 if since is None else self._clock() - since

    def add(self, key: Key) -> None:
        """Queue the key for the next free worker."""
        self._ready.setdefault(key, self._clock())
        self._changed.set()

    def add_at(self, key: Key, at: float) -> None:
        """Queue the key at this time at the latest; the earliest of several times holds."""
        if at >= self._due.get(key, float("inf")):
            return
        self._due[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._due) + SPARE:  # times that were replaced
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        self._changed.set()

    def forget(self, key: Key) -> None:
        """Drop the time of a key; if it waits already, it stays in the queue."""
        self._due.pop(key, None)

    async def take(self) -> Key:
        """Wait for the next key and return it; call `done` with it afterwards."""
        while True:
            self._ripen()
            free = next((key for key in self._ready if key not in self._busy), None)
            if free is not None:
                del self._ready[free]
                self._due.pop(free, None)
                self._busy.add(free)
                return free
            await self._wait()

    def done(self, key: Key) -> None:
        """Release the key, which may be taken again."""
        self._busy.discard(key)
        if key in self._ready:
            self._changed.set()

    def _ripen(self) -> None:
        """Queue keys whose time has been reached."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == at:  # if not, an earlier time has replaced it
                del self._due[key]
                self._ready.setdefault(key, now)

    async def _wait(self) -> None:
        self._changed.clear()
        pause = max(0.0, self._heap[0][0] - self._clock()) if self._heap else None
        try:
            async with asyncio.timeout(pause):
                await self._changed.wait()
        except TimeoutError:
            return
