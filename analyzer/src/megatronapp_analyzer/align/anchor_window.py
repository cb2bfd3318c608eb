"""Newest anchors between two clocks, all since the last jump of one of them.

A clock jumps when it is set, or when its machine was suspended or moved. A line through anchors of both sides of a jump
is right on neither side, so older anchors are dropped once two new ones contradict them and agree with each other. A
single one may be of a damaged record.
"""

import collections

from megatronapp_analyzer.align.line_fit import Anchor

WINDOW = 64
TIMES_UNCERTAINTY = 3.0
"""Difference, in uncertainties, that anchors may have: those of collectives and ends of steps are no strict bounds."""
WANDER = 20e-6
"""Change of the drift that is no jump: temperature changes it by a few parts in a million."""
MOST_DRIFT = 500e-6
"""Largest drift of two clocks whose drift is not known yet; what NTP slows down or speeds up included."""
ALIKE = 3.0
"""Anchors with an uncertainty up to this many times the smallest one predict the next anchor."""
NS_PER_S = 1e9


class AnchorWindow:
    """Anchors of a pair of clocks, at most WINDOW."""

    def __init__(self) -> None:
        self.points: collections.deque[Anchor] = collections.deque(maxlen=WINDOW)
        """Accepted anchors, oldest first."""
        self.doubt_ns = 0.0
        """Uncertainty beyond that of the anchors, while the newest one contradicts the others."""
        self._contradiction: Anchor | None = None
        self._least_ns = float("inf")
        self._oldest: Anchor | None = None
        self._newest: Anchor | None = None

    def add(self, anchor: Anchor) -> None:
        """Accept an anchor, or note that it contradicts the others."""
        deviation_ns, allowed_ns = self._deviation(anchor)
        if deviation_ns <= allowed_ns:
            self._accept(anchor)
        elif self._contradiction is not None and agree(self._contradiction, anchor):
            first = self._contradiction
            self.points.clear()
            self._least_ns, self._oldest = float("inf"), None
            self._accept(first)
            self._accept(anchor)
        else:
            self._contradiction = anchor
            self.doubt_ns = deviation_ns

    def _accept(self, anchor: Anchor) -> None:
        self.points.append(anchor)
        self._contradiction, self.doubt_ns = None, 0.0
        uncertainty_ns = anchor[2]
        self._least_ns = min(self._least_ns, uncertainty_ns)
        if self._oldest is None or self._oldest[2] > ALIKE * self._least_ns:
            self._oldest = self._newest = anchor
        elif uncertainty_ns <= ALIKE * self._least_ns:
            self._newest = anchor

    def _deviation(self, anchor: Anchor) -> tuple[float, float]:
        """Return how far an anchor is from what the others predict, and how far it may be, in ns."""
        oldest, newest = self._oldest, self._newest
        if oldest is None or newest is None:
            return 0.0, 0.0
        time_s, offset_ns, uncertainty_ns = anchor
        ahead_s, span_s = abs(time_s - newest[0]), newest[0] - oldest[0]
        drift_ns, wander_ns = 0.0, MOST_DRIFT * ahead_s * NS_PER_S
        if span_s > 0:
            known_ns = (WANDER * NS_PER_S + TIMES_UNCERTAINTY * (oldest[2] + newest[2]) / span_s) * ahead_s
            if known_ns < wander_ns:
                drift_ns = (newest[1] - oldest[1]) / span_s * (time_s - newest[0])
                wander_ns = known_ns
        deviation_ns = abs(offset_ns - newest[1] - drift_ns)
        return deviation_ns, TIMES_UNCERTAINTY * (uncertainty_ns + newest[2]) + wander_ns


def agree(first: Anchor, second: Anchor) -> bool:
    """Return True if no jump lies between two anchors."""
    apart_ns = abs(second[1] - first[1])
    return apart_ns <= TIMES_UNCERTAINTY * (first[2] + second[2]) + MOST_DRIFT * abs(second[0] - first[0]) * NS_PER_S
