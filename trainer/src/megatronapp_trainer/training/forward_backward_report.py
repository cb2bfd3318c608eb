"""How the ranks of MegaFBD share the work, as it is published for users: progress document, hub, page."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModeReport:
    """A mode of shipping that the run may use."""

    ship: str
    """Value of --fbd-ship."""
    ship_bytes: int
    """Saved tensors of a microbatch from a forward rank to a backward rank, all chunks; mean over the pipeline."""
    step_seconds: float | None = None
    """Length of a step; None: not measured yet."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the progress document."""
        return {"ship": self.ship, "shipBytes": self.ship_bytes, "stepSeconds": self.step_seconds}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardReport:
    """Roles of a run. Times in seconds, of a microbatch through all chunks of a rank; None: not measured yet."""

    ship: str
    """Mode of shipping in force."""
    is_chosen: bool
    """True if measured steps chose the mode; False if the flags did, or no choice has been made yet."""
    merged: bool
    """True if a forward rank serves a tensor group."""
    backward_per_forward: int
    modes: tuple[ModeReport, ...]
    """Modes that may be chosen, with the one in force."""
    forward_seconds: float | None = None
    """Forward pass on the slowest stage."""
    backward_seconds: float | None = None
    """Backward pass with the weight gradients, on the slowest stage."""
    ship_seconds: float | None = None
    """Time in which its shipments are copied, where it is longest."""
    advised_backward_per_forward: int | None = None
    advice: str | None = None
    """Sentence on the numbers of both roles."""

    def to_json(self, from_step: int) -> dict[str, Any]:
        """Return the entry of the progress document for what is in force from a step on."""
        (own,) = (mode for mode in self.modes if mode.ship == self.ship)
        return {
            "fromStep": from_step,
            "ship": self.ship,
            "chosen": self.is_chosen,
            "merged": self.merged,
            "backwardPerForward": self.backward_per_forward,
            "shipBytes": own.ship_bytes,
            "forwardSeconds": self.forward_seconds,
            "backwardSeconds": self.backward_seconds,
            "shipSeconds": self.ship_seconds,
            "modes": [mode.to_json() for mode in self.modes],
            "advisedBackwardPerForward": self.advised_backward_per_forward,
            "advice": self.advice,
        }
