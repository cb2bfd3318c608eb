"""Limit of comparisons and sweeps that are open at a time."""

import contextlib
from collections.abc import Iterator

from megatronapp_common.web.problems import HttpError


class OpenLimit:
    """Counts those that are being prepared besides the open ones, since several requests may be prepared at a time."""

    def __init__(self, most: int, what: str) -> None:
        """`what`: what is counted, in the plural."""
        self._most = most
        self._what = what
        self._preparing = 0

    @contextlib.contextmanager
    def reserved(self, open_count: int) -> Iterator[None]:
        """Reserve a place until the context ends, and the new one is among the open ones. Raises HttpError 429."""
        if open_count + self._preparing >= self._most:
            message = f"{self._most} {self._what} are open already"
            raise HttpError(429, "queue-full", message, hint="Cancel one, or try again later.")
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1
