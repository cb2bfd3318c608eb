"""Actions that a plan asks a backend to carry out. Each may be carried out twice without harm."""

import dataclasses
import enum

from megatronapp_common.job.api.status import Status
from megatronapp_common.save_request import SaveRequest


@dataclasses.dataclass(frozen=True, slots=True)
class EnsureSecret:
    """Create the job's secret; never replace it."""


@dataclasses.dataclass(frozen=True, slots=True)
class EnsureHub:
    """Start the hub, or restart it."""


@dataclasses.dataclass(frozen=True, slots=True)
class CreateInit:
    """Start the initializer pod."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteInit:
    """Remove the initializer pod."""

    force: bool = False
    """Delete it at once, without a grace period: it has outlived the one that it had."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateWorker:
    """Start one worker of an attempt, after all other objects that the attempt needs (policy, Service, PodGroup)."""

    index: int
    attempt: int
    spare: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartWorker:
    """Let a worker of an older attempt continue with `attempt` in its pod; ranks that run have `grace_s` seconds."""

    index: int
    attempt: int
    grace_s: float
    spare: str | None = None
    """Name of the pod of the spare that becomes this worker; None: the worker continues in its own pod."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndAtCheckpoint:
    """Let the ranks of the gang end with their next checkpoint; it is enough if one worker gets the order."""

    index: int
    attempt: int
    withdrawn: bool = False
    """True: let them continue, if they have not ended yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteWorker:
    """Stop a worker, kill it after `grace_s` seconds (0: at once), and forget it once it is deleted."""

    index: int
    attempt: int
    grace_s: float
    spare: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemoveGroup:
    """Remove the object that a queue or gang scheduler has for an attempt that is over."""

    attempt: int


@dataclasses.dataclass(frozen=True, slots=True)
class EnsureDisruptionBudget:
    """Let the cluster refuse every eviction of the gang's workers."""


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveDisruptionBudget:
    """Let the cluster evict the gang's workers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheckpoint:
    """Let the ranks of an attempt write a checkpoint and continue; it is enough if one worker gets the request."""

    index: int
    request: SaveRequest


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteHub:
    """Stop the hub of the job."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job object, whose time to live after the end of the job is over."""


class EventType(enum.StrEnum):
    """Types of Kubernetes events."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """Record an Event for users. Each follows from a change of the status, so none is recorded twice."""

    type: EventType
    reason: str
    message: str


Action = (
    EnsureSecret
    | EnsureHub
    | CreateInit
    | DeleteInit
    | CreateWorker
    | RestartWorker
    | EndAtCheckpoint
    | DeleteWorker
    | RemoveGroup
    | EnsureDisruptionBudget
    | RemoveDisruptionBudget
    | RequestCheckpoint
    | DeleteHub
    | DeleteJob
    | RecordEvent
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Actions for a backend and the new status of the job.

    A backend stores `status` first and then carries out `actions`: if it dies in between, the next plan derives from
    what exists what is left to do. It plans again when something changes, and no later than `wake_at`.
    """

    actions: tuple[Action, ...]
    status: Status
    wake_at: float | None
