"""The plan of a pipeline's ranks as it is published for users: progress document, hub, page."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """Plan for steps of one number of microbatches. Times in seconds; None: not simulated, or not measured yet."""

    schedule: str
    """Value of --dpp-schedule."""
    plan: str
    """Order of the tasks in words, as in the log."""
    microbatches: int
    chunks: int
    """Chunks of the model on each rank."""
    cap_chunks: int
    """Most chunks whose activations a rank keeps at a time."""
    spare_chunks: int
    """Chunks of them beyond what the order alone needs."""
    is_chosen: bool = False
    """True if measured times chose it; False if the configuration did, or no choice has been made yet."""
    simulated_seconds: float | None = None
    """Length of the passes of a step under this plan."""
    simulated_bubble: float | None = None
    """Share of that in which a rank runs no task; mean over the ranks."""
    static_seconds: float | None = None
    """Length under the static order, also simulated: in a loop with whole backward passes, in a vee ZB-V."""
    static_bubble: float | None = None
    measured_seconds: float | None = None
    """Length in the first steps under this plan; their median."""

    def to_json(self, from_step: int) -> dict[str, Any]:
        """Return the entry of the progress document for a plan that is in force from a step on."""
        return {
            "fromStep": from_step,
            "schedule": self.schedule,
            "plan": self.plan,
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "capChunks": self.cap_chunks,
            "spareChunks": self.spare_chunks,
            "chosen": self.is_chosen,
            "simulatedSeconds": self.simulated_seconds,
            "simulatedBubble": self.simulated_bubble,
            "staticSeconds": self.static_seconds,
            "staticBubble": self.static_bubble,
            "measuredSeconds": self.measured_seconds,
        }
