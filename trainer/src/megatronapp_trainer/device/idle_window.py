"""When the thread that drives the device leaves the interpreter to others.

Python runs one thread at a time. Whoever works while the next step is being launched lets the device wait; whoever
works while the thread of the engine waits for the device costs nothing. Threads that may choose ask here.
"""

import collections
from collections.abc import Callable


class IdleWindow:
    """A context manager of the thread of the engine: within it that thread waits for the device or for other ranks."""

    def __init__(self) -> None:
        self.is_on = False
        self.listeners: list[Callable[[], None]] = []
        """Called when one begins, by the thread of the engine: they only wake others."""
        self._deferred: collections.deque[Callable[[], None]] = collections.deque()

    def defer(self, work: Callable[[], None]) -> None:
        """In the thread of the engine: let it do this when the next step has been launched, before it waits."""
        self._deferred.append(work)

    def __enter__(self) -> None:
        for _ in range(len(self._deferred)):  # what is deferred meanwhile waits for the next one
            self._deferred.popleft()()
        self.is_on = True
        for listener in self.listeners:
            listener()

    def __exit__(self, *_: object) -> None:
        self.is_on = False
