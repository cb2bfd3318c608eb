"""How often callers may do something at the gateway."""

import time
from collections.abc import Callable, Mapping

from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.token_bucket import BucketSize, TokenBuckets

MAX_KEYS = 10_000
"""Number of keys that are remembered."""


class RateLimits:
    """Token buckets of `turns`, refilled in `fill_s` seconds; a key of a larger weight has a multiple of both."""

    def __init__(self, what: str, *, turns: int, fill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._turns = turns
        self._fill_s = fill_s
        self._clock = clock
        self._buckets = TokenBuckets(MAX_KEYS)

    def acquire(self, weights: Mapping[str, int]) -> None:
        """One turn of each key. Raises HttpError (429), and takes none, if one of them has no turn left."""
        turns = {key: self._turns * weight for key, weight in weights.items()}
        sizes = {key: BucketSize(count, count / self._fill_s) for key, count in turns.items()}
        short = self._buckets.consume(sizes, self._clock())
        if short is not None:
            text = f"{short.key} has had {turns[short.key]} {self._what} in a short time"
            raise HttpError(429, "too-many", text, f"Try again in {short.wait_s} s.", retry_s=short.wait_s)
