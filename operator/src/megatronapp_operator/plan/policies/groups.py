"""Groups of gangs: what a queue or a gang scheduler keeps of an attempt is removed with the attempt.

A pod group is ours: its scheduler counts it as long as it exists, with or without pods. A workload is Kueue's, made of
the pods: it holds them by a finalizer until all of them have ended. One that has no machine, or whose machine is lost,
does not end.
"""

from megatronapp_operator.plan.actions import RemoveGroup
from megatronapp_operator.plan.observed import Worker
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.spec import PodGroupKey
from megatronapp_operator.plan.status import TERMINAL_PHASES, ConditionType, Status

MAX_UNLISTED = 1000
"""How many of the newest attempts of such a status are looked at."""


def remove(draft: PlanBuilder) -> None:
    """Remove the groups of attempts that are over, or of which nothing is left to run."""
    if draft.job.spec.group is PodGroupKey.POD_GROUP:
        _remember_pod_group(draft)
        for attempt in draft.status.groups or ():
            if _is_over(draft, attempt) and not any(one.live or one.occupies for one in _members(draft, attempt)):
                draft.actions.append(RemoveGroup(attempt=attempt))
    if draft.job.spec.group is PodGroupKey.WORKLOAD:
        for attempt in sorted({one.attempt for one in draft.observed.workers} - draft.observed.groups_refused):
            if _is_stuck(draft, _members(draft, attempt)):
                draft.actions.append(RemoveGroup(attempt=attempt))


def _remember_pod_group(draft: PlanBuilder) -> None:
    """Keep the attempts whose pod groups may exist: their pods may vanish before the attempt is over."""
    status = draft.status
    known = _all_attempts(status) if status.groups is None else status.groups
    kept = tuple(one for one in known if one not in draft.observed.groups_removed)
    if status.attempt_time is not None and status.attempt not in kept and not _is_over(draft, status.attempt):
        kept = (*kept, status.attempt)
    draft.update(groups=kept)


def _all_attempts(status: Status) -> range:
    """The attempts that were begun, of which a status of an earlier release does not say whether their groups exist."""
    begun = status.attempt + (status.attempt_time is not None)
    return range(max(0, begun - MAX_UNLISTED), begun)


def _is_over(draft: PlanBuilder, attempt: int) -> bool:
    status = draft.status
    ends = status.phase in TERMINAL_PHASES or status.is_true(ConditionType.FAILURE_TARGET)
    return attempt != status.attempt or ends or draft.job.deletion_requested


def _is_stuck(draft: PlanBuilder, gang: list[Worker]) -> bool:
    """Whether the workload holds pods that never end by themselves, and no other runs.

    Kueue deletes all pods of a workload that is deleted, also those that have ended. While one of these is to be kept,
    for its log, the others have their time: where they only lack a machine, the cluster's collector of pods ends them.
    """
    held = [one for one in gang if _never_ends(one)]
    if not held or any(one.live and not _never_ends(one) for one in gang):
        return False
    if all(one.deletion is not None for one in gang):
        return True
    at = max(one.deletion.since for one in held if one.deletion is not None) + draft.job.spec.policy.lost_worker_s
    if draft.now < at:
        draft.wake(at)
    return draft.now >= at


def _never_ends(worker: Worker) -> bool:
    """Whether no kubelet will say that it has ended: it has none, or was killed because that one does not answer."""
    return worker.live and worker.deletion is not None and (not worker.scheduled or worker.deletion.grace_s == 0)


def _members(draft: PlanBuilder, attempt: int) -> list[Worker]:
    return [one for one in draft.observed.workers if one.attempt == attempt]
