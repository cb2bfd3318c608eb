"""Shares of what the door has: one caller, or one job's hub, never takes all connections."""

import contextlib
from collections import Counter

from megatronapp_operator.door.problems import Refusal


class Shares:
    """At most `most` things at a time for each key, such as a caller's identity."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._taken: Counter[str] = Counter()

    def take(self, *keys: str) -> contextlib.ExitStack:
        """One of each key's share until the stack is closed. Raises Refusal (429) if a share is used up."""
        with contextlib.ExitStack() as stack:
            for key in keys:
                if self._taken[key] >= self._most:
                    hint = "Close some pages, or try again in a moment."
                    raise Refusal(429, "too-many", f"{key} has {self._most} {self._what} at once, and no more", hint)
                self._taken[key] += 1
                stack.callback(self._give_back, key)
            return stack.pop_all()

    def _give_back(self, key: str) -> None:
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
