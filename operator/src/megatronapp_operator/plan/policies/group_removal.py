"""Removal of the objects that queues and gang schedulers have for an attempt, together with the attempt.

The operator creates pod groups, and their scheduler reserves capacity as long as they exist, with or without pods.
Kueue creates a workload from the pods and keeps them by a finalizer until all of them have ended. A pod without a node,
or on a lost one, does not end.
"""

from megatronapp_common.job.api.status import TERMINAL_PHASES, ConditionType, Status
from megatronapp_operator.plan.actions import RemoveGroup
from megatronapp_operator.plan.observed import Worker
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.spec import PodGroupKey

MAX_UNLISTED = 1000
"""Number of the newest attempts that are checked if the status does not list them."""


def remove(draft: PlanBuilder) -> None:
    """Remove the groups of attempts that are over, or whose pods cannot run any more."""
    if draft.job.spec.group is PodGroupKey.POD_GROUP:
        _remember_pod_group(draft)
        for attempt in draft.status.groups or ():
            members = _members(draft, attempt)
            if _is_over(draft, attempt) and not any(worker.live or worker.occupies for worker in members):
                draft.actions.append(RemoveGroup(attempt=attempt))
    if draft.job.spec.group is PodGroupKey.WORKLOAD:
        for attempt in sorted({worker.attempt for worker in draft.observed.workers} - draft.observed.groups_refused):
            if _is_stuck(draft, _members(draft, attempt)):
                draft.actions.append(RemoveGroup(attempt=attempt))


def _remember_pod_group(draft: PlanBuilder) -> None:
    """Remember the attempts whose pod groups may exist: their pods may vanish before the attempt is over."""
    status = draft.status
    known = _all_attempts(status) if status.groups is None else status.groups
    remaining = tuple(attempt for attempt in known if attempt not in draft.observed.groups_removed)
    if status.attempt_time is not None and status.attempt not in remaining and not _is_over(draft, status.attempt):
        remaining = (*remaining, status.attempt)
    draft.update(groups=remaining)


def _all_attempts(status: Status) -> range:
    """Return the attempts that have begun; a status of an earlier release does not say which of them have groups."""
    begun = status.attempt + (status.attempt_time is not None)
    return range(max(0, begun - MAX_UNLISTED), begun)


def _is_over(draft: PlanBuilder, attempt: int) -> bool:
    status = draft.status
    ends = status.phase in TERMINAL_PHASES or status.is_true(ConditionType.FAILURE_TARGET)
    return attempt != status.attempt or ends or draft.job.deletion_requested


def _is_stuck(draft: PlanBuilder, gang: list[Worker]) -> bool:
    """Return True if the workload keeps pods that never end by themselves, and no other pod of it runs.

    Deleting a workload makes Kueue delete all its pods, also those that have ended. While the log of one of these is to
    be kept, the others have their time: those that only lack a node are ended by the cluster's pod garbage collector.
    """
    endless = [worker for worker in gang if _never_ends(worker)]
    if not endless or any(worker.live and not _never_ends(worker) for worker in gang):
        return False
    if all(worker.deletion is not None for worker in gang):
        return True
    killed_at = max(worker.deletion.since for worker in endless if worker.deletion is not None)
    at = killed_at + draft.job.spec.policy.lost_worker_s
    if draft.now < at:
        draft.wake(at)
    return draft.now >= at


def _never_ends(worker: Worker) -> bool:
    """Return True if no kubelet will report the end: the pod has no node, or one that is unreachable."""
    return worker.live and worker.deletion is not None and (not worker.scheduled or worker.deletion.grace_s == 0)


def _members(draft: PlanBuilder, attempt: int) -> list[Worker]:
    return [worker for worker in draft.observed.workers if worker.attempt == attempt]
