"""Work that steps leave behind. On a GPU it is done while the thread of the engine waits for the device anyway."""

import collections
from collections.abc import Callable
from typing import TypeAlias

Work: TypeAlias = Callable[[], None]
Defer: TypeAlias = Callable[[Work], None]
"""Lets the thread of the engine do something in its next lull (`generate.lull`)."""


class DeferredWork:
    """What steps have left, done in their order. In the thread of the engine alone."""

    def __init__(self) -> None:
        self._left: collections.deque[tuple[int, Work]] = collections.deque()
        """With the step from which on a lull will do."""
        self._step = 0
        self._defer: Defer | None = None

    def set_scheduler(self, defer: Defer | None) -> None:
        """From now on lulls are waited for; until then, and with None again, nothing is put off."""
        self._defer = defer

    def submit(self, work: Work, *, of_prompts: bool) -> None:
        """Do this in the next lull, and what prompts leave in one of the next step: while prompts are read the device
        waits for the host, and not the other way round."""
        self._left.append((self._step + of_prompts, work))
        if self._defer is None:
            self.flush()
        else:
            self._defer(self._due)

    def flush(self) -> None:
        """Do all of it now. What one raises is raised, and the others are given up."""
        self._do(self._step + 1)

    def before_step(self, *, decode: bool) -> None:
        """A step begins: only what the prompts of the last one left may still wait, and only beside a decode step."""
        self._step += 1
        if not decode or any(step < self._step for step, _ in self._left):
            self.flush()

    def _due(self) -> None:
        """A lull has come."""
        self._do(self._step)
        if self._left and self._defer is not None:
            self._defer(self._due)

    def _do(self, last: int) -> None:
        """What may be done up to this step."""
        try:
            while self._left and self._left[0][0] <= last:
                self._left.popleft()[1]()
        except BaseException:
            self._left.clear()
            raise
