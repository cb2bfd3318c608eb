"""Uncertainty of times while other processes crowd a rank off its processor.

The run-queue delay of the thread that trains is known and subtracted. Its side effects are not: caches emptied by other
processes, and helper threads (network, intra-op) that wait for a processor themselves. Both grow with that delay, so a
delay beyond what is usual for the rank bounds how much of an excess the node may have caused.
"""

import numpy as np

from megatronapp_analyzer.detect.baseline import ColumnHistory, Mask, filled
from megatronapp_analyzer.detect.features import Floats
from megatronapp_analyzer.detect.settings import DetectorSettings

COMPUTE_PART = 0.5
"""Part of the additional run-queue delay by which compute may appear longer."""
HELPER_PART = 1.0
"""The same for work that helper threads take part in: deliveries."""
USUAL_DEVIATIONS = 2.0
"""Robust deviations from the median up to which a run-queue delay is usual; its effect is in the residuals."""


class CrowdingBaseline:
    """Usual run-queue delay of each rank per microbatch."""

    def __init__(self, world: int, settings: DetectorSettings) -> None:
        self._history = ColumnHistory(world, settings.window)

    def growth_s(self, queue_s: Floats) -> Floats:
        """Return run-queue delay per microbatch beyond the usual; all of it without history, 0 where it is unknown."""
        usual = filled(self._history.median() + USUAL_DEVIATIONS * self._history.deviation())
        growth: Floats = np.maximum(filled(queue_s) - usual, 0.0)
        return growth

    def learn(self, queue_s: Floats, healthy: Mask) -> None:
        """Add the healthy ranks of a step to the history."""
        self._history.add(queue_s, healthy)
