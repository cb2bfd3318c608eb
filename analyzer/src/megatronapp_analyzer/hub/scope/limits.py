"""How much one caller, and all together, may have of MegaScope. Pure: the caller gives the time in seconds."""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator

from starlette.requests import HTTPConnection

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.access import role_of
from megatronapp_analyzer.hub.problems import ApiError
from megatronapp_common.scope.protocol_requests import CALLER_HEADER

REQUESTS_PER_S = 200.0
BURST = 400.0
"""Requests at once, after a rest: a page that opens asks for many tiles."""
MAX_CALLERS = 1024
"""That are told apart; beyond, who was seen longest ago begins anew."""
MAX_PAGES = 64
"""Sockets of pages at a time."""


class Buckets:
    """Token buckets: so many requests at once, and so many in a second from then on."""

    def __init__(self, rate_per_s: float = REQUESTS_PER_S, burst: float = BURST) -> None:
        self._rate = rate_per_s
        self._burst = burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, now_s: float) -> int | None:
        """One request. None: granted; else after how many whole seconds one will be."""
        left, seen_s = self._left.pop(caller, (self._burst, now_s))
        left = min(self._burst, left + (now_s - seen_s) * self._rate)
        granted = left >= 1
        self._left[caller] = (left - 1 if granted else left, now_s)
        while len(self._left) > MAX_CALLERS:
            self._left.popitem(last=False)
        return None if granted else max(1, -int(-(1 - left) // self._rate))


class Slots:
    """So many of something at a time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: Counter[str] = Counter()

    def taken_by(self, caller: str) -> int:
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
    def held(self) -> Iterator[bool]:
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
    text = f"more than {REQUESTS_PER_S:.0f} requests in a second"
    return ApiError(429, "too-many-requests", text, "Ask less often.", retry_s=retry_s)
