"""Garbage collections that Python runs by itself, timed by the collector's callbacks.

The callbacks run in the thread whose allocations made the collector run, which need not be the one that trains. All
others wait for that thread, since it has the interpreter, so that a collection anywhere stalls the training. The ring
has a single writer: collections wait in a list until the thread that trains takes them.
"""

import collections
import gc
import logging
import time
from collections.abc import Callable, Mapping

LEAST_NS = 1_000_000
"""Processor time of a collection from which on it matters.

The youngest generation is collected many times in a step, in some 10 us each, and would fill the ring with records of
no interest: for such a one, the two calls of the listener take 1 us together. A collection of all objects takes 100 ms
and more in a process with torch and a model. The processor time decides, since a thread that waits for the interpreter
within a short collection would make it look long.
"""
MOST_COLLECTIONS = 1024
"""Collections that wait at most: more than a second of them."""

log = logging.getLogger(__name__)


class GarbageListener:
    """Notes the collections that matter, from `attach` to `close`."""

    def __init__(
        self,
        *,
        monotonic_ns: Callable[[], int],
        processor_ns: Callable[[], int] = time.thread_time_ns,
        most: int = MOST_COLLECTIONS,
    ) -> None:
        """Take the clocks: of the records, and of the processor time of the calling thread."""
        self._now_ns = monotonic_ns
        self._processor_ns = processor_ns
        self._began: tuple[int, int] | None = None
        """Time and processor time; there is one collection at a time in a process."""
        self._found: collections.deque[tuple[int, int]] = collections.deque()
        self._most = most
        self._dropped = 0
        self.is_paused = False
        """True while the collections that begin are not noted, as they have a span already."""

    def attach(self) -> None:
        """Listen from now on, if not already."""
        if self.notice not in gc.callbacks:
            gc.callbacks.append(self.notice)

    def notice(self, phase: str, _info: Mapping[str, int]) -> None:
        """Take a call of the collector: `phase` is start or stop."""
        if phase == "start":
            self._began = None if self.is_paused else (self._now_ns(), self._processor_ns())
            return
        began, self._began = self._began, None
        if began is None:
            return
        end_ns = self._now_ns()
        if end_ns - began[0] < LEAST_NS or self._processor_ns() - began[1] < LEAST_NS:
            return
        if len(self._found) < self._most:
            self._found.append((began[0], end_ns))
        else:
            self._dropped += 1

    def take(self) -> list[tuple[int, int]]:
        """Return begin and end, in ns, of the collections since the last call; the log says if some are missing."""
        taken = [self._found.popleft() for _ in range(len(self._found))]
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            log.warning("%d garbage collections are not recorded: there were over %d at a time", dropped, self._most)
        return taken

    def close(self) -> None:
        """Remove the listener from the collector."""
        if self.notice in gc.callbacks:
            gc.callbacks.remove(self.notice)
