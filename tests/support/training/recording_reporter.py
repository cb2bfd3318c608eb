"""Services of the training loop that store what it reports and calls."""

import dataclasses
from typing import Any

from megatronapp_common.trace import RecordKind


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


class RecordingServices:
    """Fake of reporter, checkpoints and observer that stores what it receives."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.consumed: list[int] = []
        self.validations: list[tuple[int, float, str]] = []
        self.saved: list[int] = []
        self.states: list[str] = []
        self.events: list[tuple[str, Any, int, int]] = []
        self.open: list[RecordKind] = []

    def step(self, metrics: Any, **_details: object) -> None:
        self.losses.append(metrics.loss)
        self.consumed.append(metrics.consumed_samples)

    def state(self, state: str) -> None:
        self.states.append(state)

    def validation(self, iteration: int, loss: float, split: str, **_details: object) -> None:
        self.validations.append((iteration, loss, split))

    background: Any = None
    memory: Any = None

    @property
    def report(self) -> Any:
        return None if self.background is None else self.background.report

    def checkpoints(self, report: Any) -> None:
        if report is not None:
            self.states.append(report)

    def save(self, state: Any) -> None:
        self.saved.append(state.iteration)
        if self.background is not None:
            self.background.pending = state.iteration


class BackgroundServices:
    """Fake of checkpoints in the background: a rank is never busy. What is called is stored with the states."""

    def __init__(self, services: RecordingServices, *, pending: int | None = None, is_failing: bool = False) -> None:
        self.pending = pending
        self.is_failing = is_failing
        self.report = "report"
        self._services = services

    def busy(self) -> bool:
        return False

    def before_change(self) -> None: ...

    def advance(self) -> None:
        self.pending = None

    def finish(self, *, raises: bool = True) -> None:
        self._services.states.append(f"finish {self.pending} {raises}")
        self.pending = None
