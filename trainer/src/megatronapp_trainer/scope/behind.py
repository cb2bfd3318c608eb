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
        self._defer: Defer | None = None

    def put_off_by(self, defer: Defer | None) -> None:
        """From now on lulls are waited for; until then, and with None again, nothing is put off."""
        self._defer = defer

    def leave(self, work: Work, *, of_prompts: bool) -> None:
        """Do this in this step's lull, and what prompts leave in the next step's: while prompts are read the device
        waits for the host, and not the other way round."""
        self._count += 1
        self._left.append((self._count, of_prompts, work))
        if self._defer is None:
            self.catch_up()
            return
        due = functools.partial(self._do, self._count)
        self._defer(functools.partial(self._defer, due) if of_prompts else due)

    def catch_up(self) -> None:
        """Do all of it now."""
        self._do(self._count)

    def before_step(self, *, decode: bool) -> None:
        """A step begins: only what prompts left may still wait, and only beside a decode step."""
        if not decode or not all(of_prompts for _, of_prompts, _ in self._left):
            self.catch_up()

    def _do(self, last: int) -> None:
        while self._left and self._left[0][0] <= last:
            self._left.popleft()[2]()
