"""Slowness of the whole job: every unit takes longer than before, as after a change of power, cooling or software.

Tests against peers and against what all units have in common do not see it. On a device's clock only: processors are
busy with other work at times.
"""

import collections
import dataclasses

import numpy as np

from megatronapp_analyzer.detect.baseline import MAD_TO_SIGMA, median_of_known
from megatronapp_analyzer.detect.features import Floats
from megatronapp_analyzer.detect.statistics.change_detection import error_of_mean
from megatronapp_native import row_medians

LEAST_SHIFT = 0.1
"""Smallest common growth that is named, in logarithms; devices that become warm are slower by less."""
LEAST_UNITS = 0.9
"""Part of the known units that must be slower by at least half of it."""
NEWEST, REFERENCE, LEAST_REFERENCE = 6, 64, 16
"""Steps that are compared, at most, with at least and at most how many before them."""
SIGMAS = 5.0
"""Deviations of the mean of the newest steps that the growth must exceed."""
CORRELATION = 0.9
"""Correlation from step to step that is assumed of the pace of a whole job."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobShift:
    """Common growth in one step; 0 where it is unknown."""

    known: bool
    over: bool
    size: float
    """In logarithms."""
    strength: float


UNKNOWN = JobShift(known=False, over=False, size=0.0, strength=0.0)


class JobBaseline:
    """Usual pass times of all units, learned while they are not slower together."""

    def __init__(self) -> None:
        self._newest: collections.deque[Floats] = collections.deque(maxlen=NEWEST)
        self._reference: collections.deque[Floats] = collections.deque(maxlen=REFERENCE)

    def read(self, passes_s: Floats) -> JobShift:
        """Judge one step by the seconds per microbatch of each unit, NaN where they are unknown."""
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(passes_s)
        if not np.isfinite(logs).any():
            return UNKNOWN
        leaves = self._newest[0] if len(self._newest) == NEWEST else None
        self._newest.append(logs)
        found = self._shift()
        if leaves is not None and found.size < LEAST_SHIFT / 2:
            self._reference.append(leaves)
        return found

    def _shift(self) -> JobShift:
        if len(self._newest) < NEWEST or len(self._reference) < LEAST_REFERENCE:
            return UNKNOWN
        reference, newest = np.stack(self._reference), np.stack(self._newest)
        known = np.isfinite(reference).any(axis=0) & np.isfinite(newest).any(axis=0)
        if known.sum() < 2:
            return UNKNOWN
        usual = row_medians(reference[:, known].T)
        own = row_medians(newest[:, known].T) - usual
        size = float(np.median(own))
        steps = row_medians(reference[:, known] - usual)
        sigma = MAD_TO_SIGMA * median_of_known(np.abs(steps - median_of_known(steps)))
        limit = max(LEAST_SHIFT, SIGMAS * sigma * float(error_of_mean(np.array([NEWEST]), CORRELATION)[0]))
        together = float(np.mean(own > LEAST_SHIFT / 2)) >= LEAST_UNITS
        lasts = min(row_medians(newest[-3:, known] - usual).tolist()) > size / 2
        return JobShift(known=True, over=size > limit and together and lasts, size=size, strength=size / limit)
