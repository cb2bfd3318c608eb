"""Placement of the gang: which workers have nodes, which are rejected, and when a partly placed gang is released.

Two jobs that each hold half of the nodes would wait for each other without end. So a gang that does not become whole
gives back its nodes, and tries again after a pause that grows and differs between jobs.
"""

import dataclasses

from megatronapp_common.job.api.status import ConditionType, Failure, FailureAction, Phase
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import outcome, reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.observed import PodRejection, Worker
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import elastic, exclusion
from megatronapp_operator.plan.policies.restart import attempt_failed, next_attempt, release_at

LASTING = frozenset(
    {reasons.UNSCHEDULABLE, reasons.QUOTA_EXCEEDED, reasons.POD_FORBIDDEN, reasons.POD_DENIED, reasons.POD_INVALID}
)
"""Reasons that stay in the condition until the gang is whole, also while it tries again."""


def record_placement(draft: PlanBuilder) -> None:
    """Record which workers of the gang have nodes, and since when one has none: also one that has lost its node."""
    status, gang = draft.status, draft.gang
    if status.attempt_time is None or status.running_time is not None:
        return
    if not any(worker.unplaced for worker in gang):
        draft.update(unplaced_time=None)
    elif status.unplaced_time is None:
        draft.update(unplaced_time=draft.now)
    if status.scheduled_time is not None:
        return
    desired = draft.job.spec.workers
    if len(gang) >= desired:
        forget_denial(draft)
    found = sum(_has_node(worker) for worker in gang)
    if found and status.holding_time is None:
        draft.update(holding_time=draft.now)
    if found >= desired:
        draft.update(scheduled_time=draft.now)
        message = f"{draft.job.spec.all_workers_text} {'has a node' if desired == 1 else 'have nodes'}"
        draft.set_condition(ConditionType.PODS_SCHEDULED, True, reasons.ALL_SCHEDULED, message)
    elif gang:
        _report_waiting(draft, f"{found} of {draft.job.spec.workers_text} placed")


def judge_change(draft: PlanBuilder) -> bool:
    """Recreate a gang that is not whole yet if the template of its workers has changed.

    After an edit this happens at once, because the edit is most likely meant for this gang, which does not start. If
    only another release of the operator makes different workers of the same job, a gang with all its workers stays.
    """
    made, status, spec = draft.observed.attempt_template, draft.status, draft.job.spec
    if made is None or made.attempt != status.attempt or made.template == spec.template:
        return False
    edited = made.generation not in {0, spec.generation}
    if status.attempt_time is None or status.running_time is not None:
        return False
    if not edited and len(draft.gang) >= spec.workers:
        return False
    why = "the job was edited" if edited else "this release of the operator makes different workers"
    message = f"{why} before attempt {status.attempt} was complete: its workers are recreated"
    draft.update(phase=Phase.PENDING)
    next_attempt(draft)
    draft.set_condition(ConditionType.PODS_SCHEDULED, False, reasons.GANG_OUTDATED, message)
    draft.event(EventType.NORMAL, reasons.GANG_OUTDATED, message)
    return True


def judge_refusal(draft: PlanBuilder) -> bool:
    """Act on a pod that the API server rejected. A job that has run before never fails for a rejection."""
    refusal = draft.observed.refusal
    if refusal is None or refusal.attempt != draft.status.attempt or draft.status.running_time is not None:
        return False
    has_run = draft.status.condition(ConditionType.RUNNING) is not None
    if not has_run and (refusal.final or _denied_for_long(draft, refusal)):
        attempt_failed(draft, _failure(draft, refusal.reason, refusal.message))
    elif not elastic.shrink_to_quota(draft, refusal):
        release(draft, refusal.reason, refusal.message)
    return True


def forget_denial(draft: PlanBuilder) -> None:
    """Forget an earlier denial: pods of the job are accepted, and a later denial begins a new period."""
    if draft.status.denied_time is not None:
        draft.update(denied_time=None)


def _denied_for_long(draft: PlanBuilder, refusal: PodRejection) -> bool:
    """Return True if a new job has been denied its pods for the start deadline. Time without quota does not count."""
    if not refusal.denied:
        draft.update(denied_time=None)
        return False
    since, limit = draft.status.denied_time, draft.job.spec.policy.start_deadline_s
    if since is None:
        draft.update(denied_time=draft.now)
        return False
    return limit is not None and draft.now >= since + limit


def judge_start(draft: PlanBuilder) -> bool:
    """Act on a gang that did not start in time: release it if it lacks nodes; if not, fail the attempt."""
    limit, status = draft.job.spec.policy.start_deadline_s, draft.status
    if limit is None or status.attempt_time is None or status.running_time is not None:
        return False
    if not draft.job.spec.gang and _judge_outdated(draft):
        return True
    since = _begins_at(draft) or (status.holding_time if draft.job.spec.gang else status.attempt_time)
    if since is None:
        return _judge_queue(draft, limit)
    if status.scheduled_time is not None and any(worker.preparing for worker in draft.gang):
        return False  # it is whole, and brings its data
    if draft.now < since + limit:
        draft.wake(since + limit)
        return False
    if status.scheduled_time is None or _lost_since(draft):
        exclusion.readmit(draft, only_slow=not status.released)  # others when the pause before has brought no room
        release(draft, reasons.UNSCHEDULABLE, f"{_unplaced(draft)} no node within {limit:g} s{_avoided(draft)}")
    else:
        message = f"{_unstarted(draft)} did not start within {limit:g} s{_waiting(draft)}"
        failure = _failure(draft, reasons.START_DEADLINE_EXCEEDED, message)
        if status.restarts or status.condition(ConditionType.RUNNING) is not None:  # its image and volumes were right
            failure = dataclasses.replace(failure, action=FailureAction.RESTART)
        attempt_failed(draft, failure)
    return True


def _judge_outdated(draft: PlanBuilder) -> bool:
    """Recreate a gang without nodes if its workers avoid one that the job does not exclude any more."""
    nodes = exclusion.outdated(draft) if draft.status.scheduled_time is None else []
    if nodes:
        message = f"{_unplaced(draft)} no node, and {', '.join(nodes)} may be used again"
        release(draft, reasons.NODE_READMITTED, message)
    return bool(nodes)


def _judge_queue(draft: PlanBuilder, limit: float) -> bool:
    """Judge a gang without nodes. It may wait in a queue without limit, but not because it avoids a node needlessly.

    To get a node back its workers must be recreated, which costs the place in the queue. So this happens only after a
    scheduler has found no capacity for the start deadline. As for a gang that holds nodes, a failed node is given back
    after a slow one.
    """
    since, excluded = draft.status.unplaced_time, draft.status.excluded_nodes
    if since is None:
        return False
    due = since + limit
    if not exclusion.outdated(draft):
        if not excluded:
            return False
        due += 0.0 if any(map(exclusion.is_slow, excluded)) else limit
    if draft.now < due:
        draft.wake(due)
        return False
    if not _judge_outdated(draft):
        node = exclusion.readmit(draft, only_slow=False)
        message = f"{_unplaced(draft)} no node for {draft.now - since:.0f} s, so {node} may be used again"
        release(draft, reasons.UNSCHEDULABLE, f"{message}{_avoided(draft)}")
    return True


def _begins_at(draft: PlanBuilder) -> float | None:
    """Return when the last worker had a node and had finished its initializers; None: some have no node."""
    if draft.status.scheduled_time is None:
        return None
    prepared = (worker.prepared_at for worker in draft.gang if worker.prepared_at is not None)
    return max([draft.status.scheduled_time, *prepared])


def _lost_since(draft: PlanBuilder) -> bool:
    """Return True if a worker that had a node has none any more: it was preempted, or its node was lost."""
    incomplete = len(draft.gang) < draft.job.spec.workers
    return incomplete or any(not _has_node(worker) or worker.taken for worker in draft.gang)


def waits_for_nodes(draft: PlanBuilder, culprit: Worker) -> bool:
    """Return True if a launcher gave up gathering only because other workers of its gang have no nodes."""
    code = outcome.outcome_of(culprit).code
    return code == ExitCode.RENDEZVOUS and draft.status.scheduled_time is None


def release(draft: PlanBuilder, reason: str, message: str) -> None:
    """Give back everything that the gang holds, and try again with a new attempt, outside the budget."""
    draft.update(released=draft.status.released + 1, released_time=draft.now, phase=Phase.PENDING)
    next_attempt(draft)
    draft.set_condition(ConditionType.PODS_SCHEDULED, False, reason, message)
    pause = release_at(draft) - draft.now
    draft.event(EventType.WARNING, reason, f"{message}; all workers are released, next attempt in {pause:.0f} s")


def _has_node(worker: Worker) -> bool:
    return worker.scheduled or not worker.live


def _report_waiting(draft: PlanBuilder, message: str) -> None:
    old = draft.status.condition(ConditionType.PODS_SCHEDULED)
    if old is not None and not old.status and old.reason in LASTING and draft.status.released:
        return
    reason = reasons.QUEUED if draft.job.spec.gang else reasons.SCHEDULING
    draft.set_condition(ConditionType.PODS_SCHEDULED, False, reason, message)


def _unplaced(draft: PlanBuilder) -> str:
    missing = draft.job.spec.workers - sum(_has_node(worker) for worker in draft.gang)
    return f"{missing} of {draft.job.spec.workers_text} had"


def _avoided(draft: PlanBuilder) -> str:
    names = ", ".join(excluded.node for excluded in draft.status.excluded_nodes)
    return f" (without the excluded {names})" if names else ""


def _unstarted(draft: PlanBuilder) -> str:
    missing = draft.job.spec.workers - draft.status.replicas.running - draft.status.replicas.succeeded
    return f"{missing} of {draft.job.spec.workers_text}"


def _waiting(draft: PlanBuilder) -> str:
    """Return why the first waiting worker waits, as the end of a message."""
    found = next((worker for worker in draft.gang if worker.waiting is not None), None)
    return "" if found is None else f"; worker {found.index}: {found.waiting}"


def _failure(draft: PlanBuilder, reason: str, message: str) -> Failure:
    attempt, action = draft.status.attempt, FailureAction.FAIL_JOB
    return Failure(time=draft.now, attempt=attempt, reason=reason, message=message, action=action)
