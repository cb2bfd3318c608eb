"""Counts for metrics that only grow."""

import bisect
import dataclasses

from megatronapp_analyzer.hub.ingest.digest import phase_seconds
from megatronapp_analyzer.hub.ingest.store import StoredStep

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)


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

    def add_step(self, step: StoredStep, workers: dict[int, int]) -> None:
        """Count one finished step."""
        seconds = step.digest.duration_ns * 1e-9
        self.steps += 1
        self.step_seconds += seconds
        self.buckets[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        for key, (total, count) in phase_seconds(step.view.records, workers).items():
            before = self.phases.get(key, (0.0, 0))
            self.phases[key] = (before[0] + total, before[1] + count)
