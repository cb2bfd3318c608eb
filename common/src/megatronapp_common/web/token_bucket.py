"""Rate limits: a bucket of tokens for each key, which fills up again with time. Pure."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import cachetools

SLACK = 1e-9
"""Fraction of a token by which rounding may err, so that a caller that waits as long as required is served."""


class BucketSize(NamedTuple):
    """Size of a bucket: `burst` tokens at once after a rest, and `per_s` tokens in a second from then on."""

    burst: float
    per_s: float


class BucketEmpty(NamedTuple):
    """A bucket with too few tokens, and after how many whole seconds it has enough."""

    key: str
    wait_s: int


class TokenBuckets:
    """Buckets by key; beyond `most_keys`, the key that was unused for longest is dropped. Times are in seconds.

    A refused request is a use: no caller gets a full bucket by repeating requests until others have evicted its own.
    """

    def __init__(self, most_keys: int) -> None:
        self._spent: cachetools.LRUCache[str, tuple[float, float]] = cachetools.LRUCache(most_keys)
        """Tokens that were taken and are not refilled, and the time of that."""

    def __len__(self) -> int:
        return len(self._spent)

    def consume(self, wanted: Mapping[str, BucketSize], now_s: float, turns: int = 1) -> BucketEmpty | None:
        """Take `turns` tokens of each key; none if a bucket has too few: return the first such, and how long to wait.

        A bucket never has more tokens than its burst.
        """
        spent = {key: self._spent_of(key, size, now_s) for key, size in wanted.items()}
        for key, size in wanted.items():
            short = spent[key] + turns - size.burst
            if short > SLACK:
                return BucketEmpty(key, max(1, math.ceil(short / size.per_s - SLACK)))
        for key in wanted:
            self._spent[key] = (spent[key] + turns, now_s)
        return None

    def _spent_of(self, key: str, size: BucketSize, now_s: float) -> float:
        spent, at_s = self._spent.get(key, (0.0, now_s))
        return max(0.0, spent - (now_s - at_s) * size.per_s)
