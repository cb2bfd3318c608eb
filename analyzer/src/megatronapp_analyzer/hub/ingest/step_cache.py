"""Cache of figures of finished steps, so that a page that polls costs the newest steps only."""

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import cachetools

from megatronapp_analyzer.hub.ingest.store import StepKey, StoredStep

CACHED_BYTES = 16 << 20
"""Memory of the figures that a cache holds: as many steps as a hub stores by default have less."""
F = TypeVar("F")


class StepCache(Generic[F]):
    """Figures of steps that were requested before; None for a step that has none.

    Threads may share it: none computes while it holds the lock.
    """

    def __init__(self, size_of: Callable[[F | None], int], limit_bytes: int = CACHED_BYTES) -> None:
        """Create an empty cache; `size_of`: an upper bound of the bytes that figures take."""
        self._size_of = size_of
        self._lock = threading.Lock()
        self._figures: cachetools.LRUCache[StepKey, F | None] = cachetools.LRUCache(limit_bytes, size_of)

    @property
    def bytes(self) -> int:
        """Return the bytes of the figures held."""
        return int(self._figures.currsize)

    def figures(self, steps: Iterable[StoredStep], compute: Callable[[StoredStep], F | None]) -> list[F]:
        """Return the figures of stored steps that have any."""
        chosen = list(steps)
        with self._lock:
            known = {step.key: self._figures[step.key] for step in chosen if step.key in self._figures}
        missing = {step.key: compute(step) for step in chosen if step.key not in known}
        # Times of a step that is not aligned yet change, and figures with them.
        final = {step.key for step in chosen if step.aligned}
        with self._lock:
            for key, figures in missing.items():
                if key in final and self._size_of(figures) <= self._figures.maxsize:
                    self._figures[key] = figures
        found = known | missing
        return [figures for step in chosen if (figures := found[step.key]) is not None]
