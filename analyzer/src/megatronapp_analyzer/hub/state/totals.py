"""Counts for metrics that only grow."""

import bisect
import dataclasses
import logging
import pathlib

from megatronapp_analyzer.hub.ingest.digest import phase_seconds
from megatronapp_analyzer.hub.ingest.spool import JsonFile
from megatronapp_analyzer.hub.ingest.store import StepKey, StoredStep

LOG = logging.getLogger(__name__)
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)


@dataclasses.dataclass(frozen=True, slots=True)
class LostTime:
    """Time that a step lost, and the sum of its blame, in seconds."""

    key: StepKey
    lost_s: float
    blamed_s: float


@dataclasses.dataclass(slots=True)
class HubTotals:
    """Counts since the hub began."""

    protocol_errors: int = 0
    records: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    buckets: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    phases: dict[tuple[int, int], tuple[float, int]] = dataclasses.field(default_factory=dict)
    """Seconds and number of spans of each (worker, kind)."""
    lost_time: LostTime | None = None
    """Lost time of the newest step whose blame was computed."""

    def add_step(self, step: StoredStep, workers: dict[int, int]) -> None:
        """Count one finished step."""
        seconds = step.digest.duration_ns * 1e-9
        self.steps += 1
        self.step_seconds += seconds
        self.buckets[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        for key, (total, count) in phase_seconds(step.view.records, workers).items():
            before = self.phases.get(key, (0.0, 0))
            self.phases[key] = (before[0] + total, before[1] + count)


class WasteSums:
    """GPU-seconds lost to confirmed causes since the job began: the next hub continues these sums."""

    def __init__(self, path: pathlib.Path | None, *, writable: bool = True) -> None:
        """Read the sums of an earlier hub. Without a path they are in memory only."""
        self._file = JsonFile(path, writable=writable)
        self.by_cause: dict[str, float] = {}
        stored = self._file.read() or {}
        try:
            self.by_cause = {str(cause): float(seconds) for cause, seconds in stored.items()}
        except (AttributeError, TypeError, ValueError) as error:
            LOG.error("%s: is damaged (%s); a new file is begun", path, error)

    def add(self, lost_s: dict[str, float]) -> None:
        """Add to the sums, and store them."""
        for cause, seconds in lost_s.items():
            self.by_cause[cause] = self.by_cause.get(cause, 0.0) + seconds
        if any(lost_s.values()):
            self._file.write(self.by_cause)
