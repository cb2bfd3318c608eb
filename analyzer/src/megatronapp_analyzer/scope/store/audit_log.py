"""Actions of controllers, for the events of the job: the operator polls them with the summary."""

import dataclasses
import datetime
import logging
import time
from collections import deque
from collections.abc import Callable

from starlette.requests import HTTPConnection

from megatronapp_common.scope.protocol_requests import CALLER_HEADER

LOG = logging.getLogger(__name__)
MAX_ENTRIES = 256
MAX_WHO = 253
UNNAMED_CALLER = "controller token"
"""Name of a caller with the job's own token, who did not use the gateway."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """One change. `at`: RFC 3339."""

    id: int
    at: str
    who: str
    what: str


class AuditLog:
    """The newest entries, oldest first. `clock` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: deque[AuditEntry] = deque(maxlen=MAX_ENTRIES)
        self._newest = 0

    def note(self, who: str, what: str) -> None:
        """Add an entry. Ids grow over restarts of the hub, too: they begin with the time in ms."""
        now = self._clock()
        self._newest = max(self._newest + 1, int(now * 1000))
        at = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat(timespec="milliseconds")
        self._kept.append(AuditEntry(id=self._newest, at=at.replace("+00:00", "Z"), who=who, what=what))
        LOG.info("%s: %s", who, what)

    def all(self) -> list[AuditEntry]:
        """Return at most MAX_ENTRIES entries, oldest first."""
        return list(self._kept)


def who_of(connection: HTTPConnection) -> str:
    """Return the name that the gateway sends. A caller with the job's token needs no gateway, and may send any name."""
    said = connection.headers.get(CALLER_HEADER, "")
    return "".join(letter for letter in said if letter.isprintable())[:MAX_WHO].strip() or UNNAMED_CALLER
