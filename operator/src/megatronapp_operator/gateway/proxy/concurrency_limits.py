"""Limits of what is under way at a time: for each caller, for each job, and in all."""

import contextlib
from collections import Counter
from collections.abc import Mapping

from megatronapp_common.web.problems import HttpError

ALL = "the gateway"
"""Key of what all share."""


class ConcurrencyLimits:
    """Limits of concurrent things for each key, such as a caller's identity, and `in_all` for all."""

    def __init__(self, what: str, *, in_all: int) -> None:
        self._what = what
        self.in_all = in_all
        self._taken: Counter[str] = Counter()

    @property
    def in_use(self) -> int:
        """How many are taken."""
        return self._taken[ALL]

    def acquire(self, most: Mapping[str, int]) -> contextlib.ExitStack:
        """One of each key's share until the stack is closed. Raises HttpError (429) if a share is used up."""
        with contextlib.ExitStack() as stack:
            for key, limit in {**most, ALL: self.in_all}.items():
                if self._taken[key] >= limit:
                    hint = "Close some pages, or try again in a moment."
                    raise HttpError(429, "too-many", f"{key} has {limit} {self._what} at once, and no more", hint)
                self._taken[key] += 1
                stack.callback(self._give_back, key)
            return stack.pop_all()

    def _give_back(self, key: str) -> None:
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
