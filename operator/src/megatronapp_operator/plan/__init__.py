"""The operator's decisions, without effects: what to do about a job, given what is seen of it, now."""

from megatronapp_operator.plan.actions import (
    Action,
    CreateWorker,
    DeleteHub,
    DeleteWorker,
    EnsureHub,
    EnsureSecret,
    EventType,
    Plan,
    RecordEvent,
)
from megatronapp_operator.plan.observed import Deletion, Hub, HubPhase, Observed, Outcome, Progress, Worker, WorkerPhase
from megatronapp_operator.plan.planner import plan
from megatronapp_operator.plan.spec import Backoff, Job, JobSpec, RunPolicy, Stop
from megatronapp_operator.plan.status import (
    TERMINAL_PHASES,
    Condition,
    ConditionType,
    Failure,
    FailureAction,
    Phase,
    Replicas,
    Status,
)

__all__ = [
    "TERMINAL_PHASES",
    "Action",
    "Backoff",
    "Condition",
    "ConditionType",
    "CreateWorker",
    "DeleteHub",
    "DeleteWorker",
    "Deletion",
    "EnsureHub",
    "EnsureSecret",
    "EventType",
    "Failure",
    "FailureAction",
    "Hub",
    "HubPhase",
    "Job",
    "JobSpec",
    "Observed",
    "Outcome",
    "Phase",
    "Plan",
    "Progress",
    "RecordEvent",
    "Replicas",
    "RunPolicy",
    "Status",
    "Stop",
    "Worker",
    "WorkerPhase",
    "plan",
]
