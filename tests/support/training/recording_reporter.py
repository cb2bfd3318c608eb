"""A reporter of the training loop that stores the figures of each step."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class RecordingReporter:
    """Reporter that collects the loss, the gradient norm and all figures of each step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    steps: list[Any] = dataclasses.field(default_factory=list)

    reports: list[Any] = dataclasses.field(default_factory=list)
    """Reports of checkpoints."""

    def step(self, metrics: Any, **_details: object) -> None:
        self.steps.append(metrics)
        self.losses.append(metrics.loss)
        self.grad_norms.append(metrics.grad_norm or 0.0)

    def checkpoints(self, report: Any) -> None:
        self.reports.append(report)

    def state(self, state: str) -> None: ...

    def validation(self, iteration: int, loss: float, split: str, **_details: object) -> None: ...
