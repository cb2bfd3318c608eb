"""The operator's clock: it goes on evenly, and follows the API server's, whose times pods and leases carry."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

SLACK_S = 2.0
"""API servers of one cluster may differ by so much without a correction."""
RESOLUTION_S = 1.0
"""Of the Date in an answer."""


class Clock:
    """Seconds since the epoch. It never goes back: where it was ahead, it stands still until the time has come."""

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()
        self._last = float("-inf")

    def __call__(self) -> float:
        """The time."""
        self._last = max(self._last, self._offset + self._monotonic())
        return self._last

    def heard(self, date: float, sent: float, received: float) -> None:
        """Take in the Date of an answer, and when (monotonic) its request was sent and it was received."""
        least, most = date - received, date + RESOLUTION_S - sent
        wanted = min(max(self._offset, least - SLACK_S), most + SLACK_S)
        if wanted == self._offset:
            return
        corrected = least if wanted > self._offset else most
        log.warning(
            "this clock is %.0f s off the API server's, which is followed from now on", self._offset - corrected
        )
        self._offset = corrected
