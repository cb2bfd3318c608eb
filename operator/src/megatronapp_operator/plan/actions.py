"""What a plan asks a backend to do. Every action may be carried out twice without harm."""

import dataclasses
import enum

from megatronapp_operator.plan.status import Status


@dataclasses.dataclass(frozen=True, slots=True)
class EnsureSecret:
    """Create the job's secret; never replace it."""


@dataclasses.dataclass(frozen=True, slots=True)
class EnsureHub:
    """Start the hub, or start it again."""


@dataclasses.dataclass(frozen=True, slots=True)
class CreateInit:
    """Start the initializer pod."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteInit:
    """Remove the initializer pod."""

    force: bool = False
    """At once: it has outlived the time that it had to go."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateWorker:
    """Start one worker of an attempt, after all that the attempt needs besides (policy, Service, PodGroup)."""

    index: int
    attempt: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteWorker:
    """Ask a worker to stop, kill it after `grace_s` seconds (0: at once), and forget it when it is gone."""

    index: int
    attempt: int
    grace_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemoveGroup:
    """Remove what the queue or gang scheduler keeps of an attempt that is over."""

    attempt: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteHub:
    """Stop the hub."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job object, whose time after its end is over."""


class EventType(enum.StrEnum):
    """Types of Kubernetes events."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """Tell people what happened; a status change stands behind each, so none is told twice."""

    type: EventType
    reason: str
    message: str


Action = (
    EnsureSecret
    | EnsureHub
    | CreateInit
    | DeleteInit
    | CreateWorker
    | DeleteWorker
    | RemoveGroup
    | DeleteHub
    | DeleteJob
    | RecordEvent
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Answer of the plan.

    A backend stores `status` first and then carries out `actions`: if it dies in between, the next plan finds out
    from what exists what is left to do. It plans again when something changes, and at the latest at `wake_at`.
    """

    actions: tuple[Action, ...]
    status: Status
    wake_at: float | None
