"""Clocks of the ranks of an attempt, step by step. Pure: no clock, no files.

Times of ranks are compared in real time. Real clocks of nodes differ by milliseconds; where the traffic of a step ties
the clocks together more tightly, all ranks use the real clock of the first.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.align.clocks import ClockAligner, ClockModel
from megatronapp_analyzer.align.device_clocks import has_device_clock
from megatronapp_analyzer.model import JobLayout, StepRecords

DEVICE_CHECK_STEPS = 16
"""Steps of a job on one node from one check of the clocks of devices to the next."""
VALID_STEPS = 64
"""Steps for which a reading holds for steps that have none yet: clocks of nodes drift by some 20 ppm."""


def has_nodes(view: StepRecords) -> bool:
    """Return true if the ranks of a step have more than one clock."""
    return len(set(view.boot_ids.values())) > 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClockReading:
    """Clocks at one step."""

    attempt: int
    step: int
    offset_ns: NDArray[np.int64] | None
    """Each rank's clock minus that of the first rank; None for a job on one node."""
    tied: NDArray[np.bool_]
    """Ranks whose clock a message ties to that of the first rank."""
    uncertainty_s: NDArray[np.float64]

    @property
    def key(self) -> tuple[int, int]:
        """Return the key (attempt, step) of the step."""
        return self.attempt, self.step

    def real_offsets_ns(self, own_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return real time minus the clock of each rank, where `own_ns` is the same by the real clock of its node."""
        if self.offset_ns is None:
            return own_ns
        return np.where(self.tied, own_ns[0] - self.offset_ns, own_ns)


class AttemptClocks:
    """Aligner of the clocks of one attempt, which is given its steps in order."""

    def __init__(self, layout: JobLayout) -> None:
        self._aligner = ClockAligner(layout)

    def observe(self, view: StepRecords) -> ClockReading | None:
        """Learn from a step; None where its clocks need no check."""
        return reading_of(view, self._aligner.observe(view)) if needs_reading(view) else None


def needs_reading(view: StepRecords) -> bool:
    """Return true if the clocks of a step are read: of several nodes always, of devices at times."""
    if not len(view.records) or has_nodes(view):
        return len(view.records) > 0
    return not view.step % DEVICE_CHECK_STEPS and bool(has_device_clock(view.records).any())


def reading_of(view: StepRecords, model: ClockModel) -> ClockReading:
    """Return what a model says of the clocks of a step."""
    return ClockReading(
        attempt=view.attempt,
        step=view.step,
        offset_ns=model.offset_ns if has_nodes(view) else None,
        tied=np.isfinite(model.uncertainty_ns),
        uncertainty_s=model.rank_uncertainty_ns() * 1e-9,
    )
