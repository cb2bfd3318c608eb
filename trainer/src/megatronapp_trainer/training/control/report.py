"""State of a controlled training, as the reporting rank publishes it in its progress document."""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from megatronapp_common.control.orders import ControlState, TrainingState

MAX_REPORTED = 8
"""Orders in the progress document: the newest; the document is small."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObeyedOrder:
    """An order that the ranks have decided on, at the same step boundary."""

    number: int
    step: int
    """Steps done when it took effect: the training obeys from this step on."""
    refusal: str | None = None
    """Reason why it changes nothing; None if it was obeyed."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the progress document."""
        return {"number": self.number, "step": self.step, "refusal": self.refusal}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlReport:
    """State at a step boundary."""

    state: ControlState
    paused_since: float | None
    """Seconds since 1970 at which the pause began; None outside of one."""
    paused_seconds: float
    """Length of the pauses of this attempt that have ended."""
    saves: bool
    """True if a stop can write a checkpoint."""
    resume_after_s: float | None = None
    """Length after which a pause ends in which no client controls the training; None: never."""
    capture_every: int | None = None
    """Steps from one capture to the next; None: none."""
    perturbation: str | None = None
    """Digest of the recipe in force; None: none is."""
    perturbed_steps: Sequence[dict[str, Any]] = ()
    """Spans of steps that were perturbed, the newest last."""
    orders: tuple[ObeyedOrder, ...]

    @property
    def is_paused(self) -> bool:
        """Return True in a pause."""
        return self.state.state is TrainingState.PAUSED

    def to_json(self) -> dict[str, Any]:
        """Return the field `control` of the progress document."""
        since = self.paused_since
        return {
            "state": self.state.state.value,
            "stepsLeft": self.state.steps_left,
            "pausedSince": None
            if since is None
            else datetime.datetime.fromtimestamp(since, datetime.UTC).isoformat(timespec="milliseconds"),
            "pausedSeconds": round(self.paused_seconds, 3),
            "saves": self.saves,
            "resumeAfterSeconds": self.resume_after_s,
            "captureEvery": self.capture_every,
            "perturbation": self.perturbation,
            "perturbed": list(self.perturbed_steps),
            "orders": [order.to_json() for order in self.orders[-MAX_REPORTED:]],
        }
