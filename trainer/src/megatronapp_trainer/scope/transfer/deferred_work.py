"""Work of steps that is done later: on a GPU while the engine's thread waits for the device anyway."""

import collections
from collections.abc import Callable
from typing import TypeAlias

Work: TypeAlias = Callable[[], object]
Defer: TypeAlias = Callable[[Callable[[], None]], None]
"""Runs work in the engine's thread in its next idle window (`device.idle_window`)."""


class DeferredWork:
    """A queue of deferred work. Used in the engine's thread only."""

    def __init__(self) -> None:
        self._left: collections.deque[tuple[int, Work]] = collections.deque()
        """Each with the first step whose idle window may run it."""
        self._step = 0
        self._defer: Defer | None = None
        self._is_scheduled = False
        """An idle window will run what is due."""

    def set_scheduler(self, defer: Defer | None) -> None:
        """Defer work to idle windows from now on; before, and after None, work runs at once."""
        self._defer = defer

    @property
    def is_empty(self) -> bool:
        """Return true if no work is left."""
        return not self._left

    def submit(self, work: Work, *, of_prompts: bool, is_ahead: bool = False) -> None:
        """Run work in the next idle window; work of prompts, and of a step that was planned ahead, in the next step's.

        While prompts are read the device waits for the host, and not the other way round. Which requests a step ahead
        really belongs to is known when the next one begins.
        """
        self._left.append((self._step + (of_prompts or is_ahead), work))
        if self._defer is not None:
            self._schedule(self._defer)
        elif not is_ahead:
            self.flush()

    def flush(self) -> None:
        """Run all of it now. An exception is raised, and drops what is left."""
        self._do(self._step + 1)

    def before_step(self, *, decode: bool) -> None:
        """Begin a step. Only work of the last step's prompts, or of a last step that was planned ahead, may still wait,
        and only during a decode step.
        """
        self._step += 1
        if not decode or any(step < self._step for step, _ in self._left):
            self.flush()

    def _due(self) -> None:
        """Run what is due in this idle window."""
        self._is_scheduled = False
        self._do(self._step)
        if self._left and self._defer is not None:
            self._schedule(self._defer)

    def _schedule(self, defer: Defer) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            defer(self._due)

    def _do(self, last: int) -> None:
        """Run the work that is due up to this step."""
        try:
            while self._left and self._left[0][0] <= last:
                self._left.popleft()[1]()
        except BaseException:
            self._left.clear()
            raise
