"""Cache of answers that take long to compute."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar, cast

REST_FACTOR = 10
"""An answer is returned for this many times as long as it took, even if a newer one could be computed."""
V = TypeVar("V")


class AnswerCache:
    """Newest answers by their question. Computed one at a time, and for a tenth of a core at most.

    A page asks again with every step; an answer that took long is returned for ten times as long as it took.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, entries: int = 16) -> None:
        self._clock = clock
        self._entries = entries
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[object, ...], tuple[object, float, object]] = OrderedDict()

    def answer(self, question: tuple[object, ...], version: object, compute: Callable[[], V]) -> V:
        """Return what `compute` returns; an older answer to the question if `version` or too little time has passed."""
        with self._lock:
            known = self._answers.get(question)
            now = self._clock()
            if known is not None and (known[0] == version or now < known[1]):
                self._answers.move_to_end(question)
                return cast(V, known[2])
            found = compute()
            ended = self._clock()
            self._answers[question] = (version, ended + REST_FACTOR * (ended - now), found)
            self._answers.move_to_end(question)
            while len(self._answers) > self._entries:
                self._answers.popitem(last=False)
            return found
