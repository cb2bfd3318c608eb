"""Work that steps leave behind. On a GPU it is done while the thread of the engine waits for the device anyway."""

import collections
import functools
from collections.abc import Callable
from typing import TypeAlias

Work: TypeAlias = Callable[[], None]
Defer: TypeAlias = Callable[[Work], None]
"""Lets the thread of the engine do something in its next lull (`generate.lull`)."""


class Behind:
    """What steps have left, done in their order. In the thread of the engine alone."""

    def __init__(self) -> None:
        self._left: collections.deque[tuple[int, bool, Work]] = collections.deque()
        self._count = 0
        self._steps = 0
        self._defer: Defer | None = None

    def put_off_by(self, defer: Defer | None) -> None:
        """From now on lulls are waited for; until then, and with None again, nothing is put off."""
        self._defer = defer

    def leave(self, work: Work, *, of_prompts: bool) -> None:
        """Do this in the next lull, and what prompts leave in one of a later step: while prompts are read the device
        waits for the host, and not the other way round."""
        self._count += 1
        self._left.append((self._count, of_prompts, work))
        if self._defer is None:
            self.catch_up()
        else:
            self._defer(functools.partial(self._due, self._count, self._steps + of_prompts))

    def catch_up(self) -> None:
        """Do all of it now. What one raises is raised, and the others are given up."""
        self._do(self._count)

    def before_step(self, *, decode: bool) -> None:
        """A step begins: only what prompts left may still wait, and only beside a decode step."""
        self._steps += 1
        if not decode or not all(of_prompts for _, of_prompts, _ in self._left):
            self.catch_up()

    def _due(self, last: int, step: int) -> None:
        """A lull has come."""
        if self._steps >= step:
            self._do(last)
        elif self._defer is not None and self._left:
            self._defer(functools.partial(self._due, last, step))

    def _do(self, last: int) -> None:
        try:
            while self._left and self._left[0][0] <= last:
                self._left.popleft()[2]()
        except BaseException:
            self._left.clear()
            raise
