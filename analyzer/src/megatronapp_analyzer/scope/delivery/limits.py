"""How much one caller, and all together, may have of MegaScope. Pure: the caller gives the time in seconds."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from starlette.requests import HTTPConnection

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.web.problems import ApiError
from megatronapp_analyzer.web.roles import role_of
from megatronapp_common.scope.protocol_requests import CALLER_HEADER
from megatronapp_common.web.token_bucket import BucketSize

REQUESTS = BucketSize(burst=400, per_s=200)
"""Of one caller: a page that opens asks for many tiles."""
MAX_CALLERS = 1024
"""That are told apart; beyond, who was seen longest ago begins anew."""
MAX_PAGES = 64
"""Sockets of pages at a time."""


class ConcurrencySlots:
    """So many of something at a time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: Counter[str] = Counter()

    def in_use_by(self, caller: str) -> int:
        """How many a caller has."""
        return self._taken[caller]

    def take(self, caller: str = "") -> bool:
        """Whether one was free; it is given back by `give_back`."""
        granted = self._taken.total() < self._count
        if granted:
            self._taken[caller] += 1
        return granted

    def give_back(self, caller: str = "") -> None:
        """What `take` gave."""
        self._taken[caller] -= 1
        self._taken += Counter()  # forgets who has none

    @contextlib.contextmanager
    def acquired(self) -> Iterator[bool]:
        """Take one, if one is free, until left."""
        granted = self.take()
        try:
            yield granted
        finally:
            if granted:
                self.give_back()


def caller_of(connection: HTTPConnection) -> str:
    """Whose share a request takes: whom the door names, else where it comes from."""
    host = connection.client.host if connection.client else ""
    return f"{role_of(connection).value} {connection.headers.get(CALLER_HEADER, host)[:253]}"


def too_many_pages() -> ProtocolError:
    """Refuses a page."""
    return ProtocolError("too-many-pages", f"{MAX_PAGES} pages look already", "Close one, and connect again.")


def too_fast(retry_s: int) -> ApiError:
    """Refuses a request."""
    text = f"more than {REQUESTS.per_s:.0f} requests in a second"
    return ApiError(429, "too-many-requests", text, "Ask less often.", retry_s=retry_s)
