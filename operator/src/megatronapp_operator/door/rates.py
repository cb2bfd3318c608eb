"""How often something may be done: a bucket of turns for each key, which fills up again with time."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from megatronapp_operator.door.problems import Refusal

MAX_KEYS = 10_000
"""So many are remembered; who was not heard of for longest counts as new."""


class Rates:
    """`turns` at once, and as many more in `fill_s` seconds; of a key that weighs more, so many times as often."""

    def __init__(self, what: str, *, turns: int, fill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._turns = turns
        self._fill_s = fill_s
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Turns that were taken and have not come back, and when that was."""

    def take(self, weights: Mapping[str, int]) -> None:
        """One turn of each key. Raises Refusal (429), and takes none, if one of them has no turn left."""
        now = self._clock()
        left = {key: self._left(key, weight, now) for key, weight in weights.items()}
        for key, weight in weights.items():
            if left[key] < 1:
                wait_s = math.ceil((1 - left[key]) * self._fill_s / (self._turns * weight))
                text = f"{key} has had {self._turns * weight} {self._what} in a short time"
                raise Refusal(429, "too-many", text, f"Try again in {wait_s} s.", retry_s=wait_s)
        for key, weight in weights.items():
            self._spent[key] = (self._turns * weight - left[key] + 1, now)
            self._spent.move_to_end(key)
        while len(self._spent) > MAX_KEYS:
            self._spent.popitem(last=False)

    def _left(self, key: str, weight: int, now: float) -> float:
        spent, at = self._spent.get(key, (0.0, now))
        whole = self._turns * weight
        return whole - max(0.0, spent - (now - at) * whole / self._fill_s)
