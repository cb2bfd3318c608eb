"""Position in the log of a container, from which a connection that broke is continued."""

import datetime
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?(.*)", re.DOTALL)
"""Line of the kubelet with `timestamps=true`: the time in RFC 3339, to nanoseconds, and what the container wrote."""


class LogTime(NamedTuple):
    """Time of a line."""

    second: datetime.datetime
    nanosecond: int


class LogPosition:
    """Time of the last line that was read, and how many lines of that very time were read.

    Counting all lines would not do: a kubelet that has rotated a log begins with the newest file.
    """

    def __init__(self) -> None:
        self._last: LogTime | None = None
        self._same = 0

    @property
    def query(self) -> dict[str, str]:
        """Parameters of a request for the lines from here on; the API server rounds the time down to seconds."""
        since = {} if self._last is None else {"sinceTime": self._last.second.isoformat()}
        return {"timestamps": "true"} | since

    def new_lines(self, stamped: Iterable[str]) -> Iterator[str]:
        """Yield the lines that were not read before, without their times."""
        last, same = self._last, self._same
        for line in stamped:
            found = _STAMPED.fullmatch(line)
            if found is None:  # of a server that writes no times
                yield line
                continue
            moment = LogTime(datetime.datetime.fromisoformat(found[1] + found[3]), int((found[2] or "0").ljust(9, "0")))
            if last is not None and moment <= last:
                if moment < last:
                    continue
                if same > 0:
                    same -= 1
                    continue
            else:
                last = None  # all that follow are new, also where the clock of the node is set back
            self._same = self._same + 1 if moment == self._last else 1
            self._last = moment
            yield found[4]
