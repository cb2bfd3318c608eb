"""The operator's clock: it advances evenly, and follows that of the API server, which sets times of pods and leases."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

SLACK_S = 2.0
"""Seconds by which API servers of one cluster may differ without a correction."""
RESOLUTION_S = 1.0
"""Seconds of resolution of the Date header."""
AGREED, AGREED_S = 4, 60.0
"""Number of successive answers that must agree, and the seconds that they must span: one server or proxy may be
wrong."""
SLEW = 0.5
"""Fraction by which a correction makes the clock faster or slower, so that it neither leaps nor stops."""


class ServerClock:
    """Seconds since the epoch, never decreasing.

    Before its first use the clock adopts each answer that differs. Later it follows only what several answers agree on,
    and slowly: deadlines and back-offs that were computed before stay valid.
    """

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._moved_at = monotonic()
        self._offset = self._target = wall() - self._moved_at
        self._last = float("-inf")
        self._read = False
        self._doubt: tuple[float, float, int] | None = None
        """Offset that answers imply instead, when the first of them was received, and their number."""

    def __call__(self) -> float:
        self._read = True
        return self._move()

    def observe_date(self, date: float, sent: float, received: float) -> None:
        """Process the Date of an answer, with the monotonic times of sending the request and receiving the answer."""
        least, most = date - received, date + RESOLUTION_S - sent
        if least - SLACK_S <= self._target <= most + SLACK_S:
            self._doubt = None
            return
        corrected = least if self._target < least else most
        if not self._read:
            self._follow(corrected)
            self._offset = corrected
            return
        named, since, count = self._doubt or (corrected, received, 0)
        if not least - SLACK_S <= named <= most + SLACK_S:  # it contradicts the doubted answers, too
            named, since, count = corrected, received, 0
        self._doubt = named, since, count + 1
        if count + 1 >= AGREED and received - since >= AGREED_S:
            self._move()
            self._follow(corrected)

    def _follow(self, offset: float) -> None:
        log.warning("this clock is %.0f s off the API server's; following that from now on", self._target - offset)
        self._target, self._doubt = offset, None

    def _move(self) -> float:
        """Bring the offset nearer to its target, as far as the time since the last move allows."""
        now = self._monotonic()
        step = SLEW * max(0.0, now - self._moved_at)
        self._offset += min(max(self._target - self._offset, -step), step)
        self._moved_at = now
        self._last = max(self._last, self._offset + now)
        return self._last
