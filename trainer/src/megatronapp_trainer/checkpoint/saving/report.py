"""Figures of the checkpoints of a run, as the log, the progress document and the metrics show them."""

import dataclasses
from typing import Any

from megatronapp_common.text.times import rfc3339_micro


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """State of the checkpoints in memory of this attempt, as this rank sees it."""

    iteration: int | None = None
    """Newest step that this rank has copied to all its places."""
    resumed_iteration: int | None = None
    """Step that this attempt was resumed from; None: from none in memory."""
    blocked_s: float | None = None
    """Time for which training waited for the newest save."""
    written_s: float | None = None
    """Time from the begin of that save until its copies had been sent and received."""
    size_bytes: int | None = None
    """Size of a copy of this rank's state."""
    last_failure: str | None = None
    """Reason why saves have ended, if they have."""

    def to_json(self) -> dict[str, Any]:
        """Return the form in the progress document."""
        return {
            "iteration": self.iteration,
            "resumedIteration": self.resumed_iteration,
            "blockedSeconds": self.blocked_s,
            "writeSeconds": self.written_s,
            "bytes": self.size_bytes,
            "lastFailure": self.last_failure,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """State of the checkpoints of this attempt."""

    iteration: int | None = None
    """Newest step whose checkpoint is published."""
    taken_at: float | None = None
    """When the state of that step was taken, in seconds since the epoch: later steps are in no checkpoint."""
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
    memory: MemoryReport | None = None
    """Checkpoints in memory; None: there are none."""

    def to_json(self) -> dict[str, Any]:
        """Return the form in the progress document."""
        return {
            "iteration": self.iteration,
            "takenAt": None if self.taken_at is None else rfc3339_micro(round(self.taken_at, 6)),
            "pendingIteration": self.pending_iteration,
            "blockedSeconds": self.blocked_s,
            "writeSeconds": self.written_s,
            "failures": self.failures,
            "lastFailure": self.last_failure,
            **({} if self.memory is None else {"memory": self.memory.to_json()}),
        }
