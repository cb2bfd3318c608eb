"""Measured times of one step's tasks on one rank."""

import dataclasses
import statistics

from megatronapp_trainer.pipeline.planning.tasks import Task, TaskKind


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Times of the tasks that a rank ran in a step, and of the transfers that it received, in seconds."""

    tasks: list[tuple[Task, float]] = dataclasses.field(default_factory=list)
    transfers: list[float] = dataclasses.field(default_factory=list)
    begun: float = 0.0
    """Beginning of the step on the host's monotonic clock."""
    ended: float = 0.0
    """End of the last task on that clock."""


def median_seconds(steps: list[StepTimes]) -> dict[tuple[TaskKind, int], float]:
    """Return the median of each kind of task in each chunk."""
    found: dict[tuple[TaskKind, int], list[float]] = {}
    for step in steps:
        for task, seconds in step.tasks:
            found.setdefault((task.kind, task.chunk), []).append(seconds)
    return {key: statistics.median(values) for key, values in found.items()}
