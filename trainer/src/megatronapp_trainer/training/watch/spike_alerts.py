"""Alerts of steps whose loss or gradient norm is far above that of the steps before. Pure."""

import dataclasses
import math
import statistics
from collections import deque

WINDOW = 64
"""Steps that a step is compared with."""
LEAST = 16
"""Steps without which nothing is judged."""
_NORMAL = 1.4826
"""Standard deviations of a normal distribution in a median absolute deviation."""
_SMALLEST = 0.01
"""Least deviation as a fraction of the median: figures that hardly change would be alerts otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spike:
    """A figure far above its median."""

    value: float
    median: float
    deviations: float
    """Distance from the median in standard deviations, estimated by the median absolute deviation."""


class SpikeDetector:
    """Compares a figure of each step with its median over the steps before; spikes do not enter it."""

    def __init__(self, threshold: float) -> None:
        """Take the number of standard deviations above the median from which a value is a spike."""
        self._threshold = threshold
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    def judge(self, value: float) -> Spike | None:
        """Return the spike that this value is; None if it is none.

        After `LEAST` spikes in a row the figure is taken to have a new level, and comparison begins again.
        """
        if not math.isfinite(value):
            return None
        spike = self._spike(value) if len(self._recent) >= LEAST else None
        if spike is None:
            self._in_a_row = 0
            self._recent.append(value)
            return None
        self._in_a_row += 1
        if self._in_a_row >= LEAST:
            self._recent.clear()
            self._in_a_row = 0
        return spike

    def _spike(self, value: float) -> Spike | None:
        median = statistics.median(self._recent)
        spread = _NORMAL * statistics.median(abs(other - median) for other in self._recent)
        deviations = (value - median) / max(spread, _SMALLEST * abs(median), 1e-12)
        return Spike(value, median, deviations) if deviations > self._threshold else None
