"""Threads for parts of a computation that do not depend on each other; NumPy and native functions run at once."""

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from megatronapp_native import set_threads

LEAST_RECORDS = 1 << 16
"""Records of a step from which on a part of it takes much longer than to give it to another thread."""
T = TypeVar("T")


class PartThreads:
    """Threads next to that of the caller. Parts change nothing, so that results are the same for any number of them."""

    def __init__(self, count: int = 1, *, least_records: int = LEAST_RECORDS) -> None:
        """Create threads. `count` includes that of the caller, which computes all parts if there is no other."""
        self._least_records = least_records
        self._pool = concurrent.futures.ThreadPoolExecutor(count - 1, "part") if count > 1 else None

    def begin(self, records: int, part: Callable[[], T]) -> Callable[[], T]:
        """Begin a part of the work on a step of `records`; return a function that waits for its result.

        Without other threads, where none can start, and for small steps, that function computes it. It is called once,
        and raises what the part raises. A part must not wait for another one.
        """
        if self._pool is None or records < self._least_records:
            return part
        try:
            return self._pool.submit(part).result
        except RuntimeError:  # the system has no more threads for this process: the caller computes the same
            return part


ALONE = PartThreads()
"""The thread of the caller."""


def use_threads(count: int) -> PartThreads:
    """Allow native functions of this process up to `count` threads, and return threads for other parts of the work."""
    set_threads(count)
    return PartThreads(count)
