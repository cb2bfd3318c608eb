"""An observer of trainings for tests."""

from collections.abc import Sequence
from typing import Any

from megatronapp_common.trace import RecordKind


class RecordingObserver:
    """Observer of a training that stores spans; its transport is the one that it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int, int]] = []
        self.losses: list[float] = []
        self.collectives = None

    def announcement(self) -> tuple[float, ...]:
        return ()

    def agreed(self, sums: Sequence[float]) -> None:
        assert not sums

    def wrap_transport(self, transport: Any) -> Any:
        return transport

    def step_begin(self, step: int) -> None:
        self.events.append(("step_begin", "STEP", step, -1))

    def step_end(self, metrics: Any) -> None:
        self.losses.append(metrics.loss)
        self.events.append(("step_end", "STEP", -1, -1))

    def begin(self, kind: RecordKind, chunk: int, microbatch: int, *, early: bool = False) -> None:
        self.events.append(("begin", kind.name, chunk, microbatch))

    def end(self, kind: RecordKind) -> None:
        self.events.append(("end", kind.name, -1, -1))

    def validation(self, loss: float) -> None:
        self.events.append(("validation", "", -1, -1))
