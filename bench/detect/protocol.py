"""Input and output of detectors, the same for every detector of the benchmark."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from detect.layout import Grid
from megatronapp_common.trace import RECORD

RANK_RECORD = np.dtype([*RECORD.descr, ("rank", "<i4")])
"""A trace record with the global rank that wrote it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Records of one step of a job as a hub would assemble them, sorted by rank, then start."""

    grid: Grid
    step: int
    records: NDArray[np.void]
    boot_ids: tuple[str, ...]
    """Clock domain of each rank."""
    real_time_s: float
    lost: int = 0
    """Records that were lost around this step."""
    attempt: int = 0
    """Attempt of the job: after a restart steps are repeated in the next one."""


@dataclasses.dataclass(frozen=True, order=True)
class NamedSubject:
    """Ranks that are named together; of a link source and destination."""

    ranks: tuple[int, ...]
    is_link: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A subject that a detector names after a step, for as long as it repeats it after each further step."""

    subject: NamedSubject
    cause: str
    """`compute`, `host`, `data`, `link`, `regression`, or another word for an open cause."""
    cost_s: float | None = None
    """Seconds by which each step would be shorter, if the detector estimates it."""
    confidence: float = 1.0


class Detector(Protocol):
    """A detector of one job, from its first step on."""

    def step(self, trace: StepTrace) -> Sequence[Verdict]:
        """Take the next step; return all that is named now, and not only what is new."""
        ...
