"""Limits of what is in progress at a time: for each caller or job, and for all together."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping


class ConcurrencyLimits:
    """Numbers of requests, sockets or downloads in progress, by key. `server`, the key of all, has at most `total`.

    `refuse` makes the error for a key that is at its limit.
    """

    def __init__(self, server: str, total: int, *, refuse: Callable[[str, int], Exception]) -> None:
        self._server = server
        self._total = total
        self._refuse = refuse
        self._taken: Counter[str] = Counter()

    def in_use(self, key: str | None = None) -> int:
        """Return the number of a key, or of all."""
        return self._taken[self._server if key is None else key]

    def acquire(self, limits: Mapping[str, int] | None = None) -> contextlib.ExitStack:
        """Count one more of each key until the stack is closed. Raises an error of `refuse`, and counts nothing."""
        with contextlib.ExitStack() as stack:
            for key, limit in {**(limits or {}), self._server: self._total}.items():
                if self._taken[key] >= limit:
                    raise self._refuse(key, limit)
                self._taken[key] += 1
                stack.callback(self._release, key)
            return stack.pop_all()

    def _release(self, key: str) -> None:
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
