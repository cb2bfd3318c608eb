"""Idle windows: times in which the thread that drives the device leaves the interpreter to others.

Python runs one thread at a time. Work during the launch of the next step makes the device wait; work while the thread
of the engine waits for the device costs nothing. Threads that can defer work do so through this class.
"""

import collections
from collections.abc import Callable


class IdleWindow:
    """Context manager of the engine's thread: inside it that thread waits for the device or for other ranks."""

    def __init__(self) -> None:
        self.is_on = False
        self.listeners: list[Callable[[], None]] = []
        """Callbacks at the beginning of a window, in the engine's thread: they only wake other threads."""
        self._deferred: collections.deque[Callable[[], None]] = collections.deque()

    def defer(self, work: Callable[[], None]) -> None:
        """Defer `work` of the engine's thread until the next step has been launched, before it waits."""
        self._deferred.append(work)

    def __enter__(self) -> None:
        for _ in range(len(self._deferred)):  # what is deferred meanwhile waits for the next one
            self._deferred.popleft()()
        self.is_on = True
        for listener in self.listeners:
            listener()

    def __exit__(self, *_: object) -> None:
        self.is_on = False
