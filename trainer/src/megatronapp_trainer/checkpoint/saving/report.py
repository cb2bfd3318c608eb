"""Figures of the checkpoints of a run, as the log, the progress document and the metrics show them."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """State of the checkpoints of this attempt."""

    iteration: int | None = None
    """Newest step whose checkpoint is published."""
    pending_iteration: int | None = None
    """Step whose checkpoint is being written."""
    blocked_s: float | None = None
    """Time for which training waited for the newest checkpoint."""
    written_s: float | None = None
    """Time from the begin of that checkpoint until it was published."""
    failures: int = 0
    """Number of failed writes of this attempt."""
    last_failure: str | None = None
    """Reason of the newest of them."""

    def to_json(self) -> dict[str, Any]:
        """Return the form in the progress document."""
        return {
            "iteration": self.iteration,
            "pendingIteration": self.pending_iteration,
            "blockedSeconds": self.blocked_s,
            "writeSeconds": self.written_s,
            "failures": self.failures,
            "lastFailure": self.last_failure,
        }
