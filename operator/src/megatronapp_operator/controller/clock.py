"""The operator's clock: it goes on evenly, and follows the API server's, whose times pods and leases carry."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

SLACK_S = 2.0
"""API servers of one cluster may differ by so much without a correction."""
RESOLUTION_S = 1.0
"""Of the Date in an answer."""
AGREED, AGREED_S = 4, 60.0
"""A correction needs so many answers in a row that agree, over so many seconds: one server or proxy may be wrong."""
SLEW = 0.5
"""A correction makes the clock run faster or slower by this share, so that it neither leaps nor stands still."""


class ServerClock:
    """Seconds since the epoch. It never goes back.

    Until it is read for the first time it takes over each answer that differs. Later only what several answers agree
    on is followed, and slowly: deadlines and back-offs that were computed before still hold.
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
        """Offset that answers name instead, when the first of them was received, and how many there were."""

    def __call__(self) -> float:
        """The time."""
        self._read = True
        return self._move()

    def observe_date(self, date: float, sent: float, received: float) -> None:
        """Take in the Date of an answer, and when (monotonic) its request was sent and it was received."""
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
        log.warning("this clock is %.0f s off the API server's, which is followed from now on", self._target - offset)
        self._target, self._doubt = offset, None

    def _move(self) -> float:
        """Bring the offset nearer to its target, as far as the time since the last move allows."""
        now = self._monotonic()
        step = SLEW * max(0.0, now - self._moved_at)
        self._offset += min(max(self._target - self._offset, -step), step)
        self._moved_at = now
        self._last = max(self._last, self._offset + now)
        return self._last
