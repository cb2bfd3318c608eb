"""How often something may be done: a bucket of turns for each key, which fills up again with time. Pure."""

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

SLACK = 1e-9
"""Of a turn: whoever waits as long as told is served, however numbers are rounded."""


class BucketSize(NamedTuple):
    """Of a bucket: so many turns at once after a rest, and so many in a second from then on."""

    burst: float
    per_s: float


class BucketEmpty(NamedTuple):
    """A bucket with too few turns, and after how many whole seconds it has enough."""

    key: str
    wait_s: int


class TokenBuckets:
    """Buckets by key; beyond `most_keys`, who was not heard of for longest begins anew. Times are in seconds."""

    def __init__(self, most_keys: int) -> None:
        self._most = most_keys
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Turns that were taken and have not come back, and when that was."""

    def __len__(self) -> int:
        return len(self._spent)

    def consume(self, wanted: Mapping[str, BucketSize], now_s: float, turns: int = 1) -> BucketEmpty | None:
        """So many turns of each key; of none, if one of them has too few left: the first such, and how long to wait.

        More turns than a burst are never there.
        """
        spent = {key: self._spent_of(key, size, now_s) for key, size in wanted.items()}
        for key, size in wanted.items():
            short = spent[key] + turns - size.burst
            if short > SLACK:
                return BucketEmpty(key, max(1, math.ceil(short / size.per_s - SLACK)))
        for key in wanted:
            self._spent[key] = (spent[key] + turns, now_s)
            self._spent.move_to_end(key)
        while len(self._spent) > self._most:
            self._spent.popitem(last=False)
        return None

    def _spent_of(self, key: str, size: BucketSize, now_s: float) -> float:
        spent, at_s = self._spent.get(key, (0.0, now_s))
        return max(0.0, spent - (now_s - at_s) * size.per_s)
