"""Initializers: one pod prepares what the workers have in common, once, before the first gang."""

from megatronapp_common.job.api.status import ConditionType, Failure, FailureAction, Phase
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import CreateInit, DeleteInit, EventType
from megatronapp_operator.plan.observed import InitPod, WorkerPhase
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import placement
from megatronapp_operator.plan.policies.restart import (
    backoff_s,
    fail_job,
    record,
    restart_at,
    unbudgeted_failures_since,
)


def initialize(draft: PlanBuilder) -> bool:
    """Run the initializers, and create nothing of the gang before they have succeeded."""
    if not draft.job.spec.initializers or draft.status.initialized:
        return False
    init = draft.observed.init
    if init is not None:
        placement.forget_denial(draft)
    if init is None:
        _start(draft)
    elif draft.status.init_clearing or init.deleting:
        _clear(draft, init)
    elif init.phase is WorkerPhase.SUCCEEDED:
        _done(draft)
        return False
    elif init.live and _is_lost(draft, init):
        _preempted(draft, init, reasons.LOST_NODE)
    elif init.phase is WorkerPhase.FAILED and init.disrupted is not None:
        _preempted(draft, init, init.disrupted)
    elif init.phase is WorkerPhase.FAILED:
        _failed(draft, init.message or "the initializer failed and left no message")
    else:
        _wait(draft, init)
    return True


def stop_init(draft: PlanBuilder, *, ended_too: bool = False) -> None:
    """Delete the initializer pod if it runs; with `ended_too` also if it has ended."""
    init = draft.observed.init
    if init is not None and not init.deleting and (init.live or ended_too):
        draft.actions.append(DeleteInit())


def _start(draft: PlanBuilder) -> None:
    draft.update(init_clearing=False)
    at = max(restart_at(draft), _retry_at(draft))
    if draft.now < at:
        draft.wake(at)
        return
    draft.actions.append(CreateInit())
    start_time = draft.now if draft.status.start_time is None else draft.status.start_time
    draft.update(start_time=start_time)
    if draft.status.phase is not Phase.RESTARTING:
        draft.update(phase=Phase.STARTING)
    message = "the initializers run; the workers follow"
    draft.set_condition(ConditionType.INITIALIZED, False, reasons.INITIALIZERS_RUNNING, message)
    _wake_for_start(draft, draft.now)


def _retry_at(draft: PlanBuilder) -> float:
    failed = draft.status.init_failed_time
    if failed is None:
        return draft.now
    policy = draft.job.spec.policy
    lately = unbudgeted_failures_since(draft.status, failed - policy.reset_after_s)
    return failed + backoff_s(policy.backoff, max(draft.status.init_restarts, lately))


def _done(draft: PlanBuilder) -> None:
    message = "the initializers have succeeded"
    draft.update(initialized=True, init_clearing=False)
    draft.set_condition(ConditionType.INITIALIZED, True, reasons.INITIALIZERS_SUCCEEDED, message)
    draft.event(EventType.NORMAL, reasons.INITIALIZERS_SUCCEEDED, message)


def _failed(draft: PlanBuilder, message: str) -> None:
    """Try again with back-off, as often as a gang may restart."""
    limit = draft.job.spec.policy.max_restarts
    spent = draft.status.init_restarts >= limit
    action = FailureAction.FAIL_JOB if spent else FailureAction.RESTART
    reason, attempt = reasons.INITIALIZER_FAILED, draft.status.attempt
    record(draft, Failure(time=draft.now, attempt=attempt, reason=reason, message=message, action=action))
    draft.set_condition(ConditionType.INITIALIZED, False, reason, message)
    draft.update(init_failed_time=draft.now)
    if spent:
        fail_job(draft, reason, f"the initializers were started {limit + 1} times; {message}")
    else:
        draft.update(init_restarts=draft.status.init_restarts + 1, init_clearing=True)


def _preempted(draft: PlanBuilder, init: InitPod, why: str) -> None:
    """Try again outside the budget: neither the initializers nor what they fetch is at fault."""
    message = f"the initializers were disrupted: {init.message or why}"
    action, attempt = FailureAction.RESTART_IGNORE_MAX, draft.status.attempt
    record(draft, Failure(time=draft.now, attempt=attempt, reason=why, message=message, action=action))
    draft.set_condition(ConditionType.INITIALIZED, False, reasons.INITIALIZER_DISRUPTED, message)
    draft.update(init_failed_time=draft.now, init_clearing=True)


def _is_lost(draft: PlanBuilder, init: InitPod) -> bool:
    """Return True if the node has not answered for so long that the pod is given up."""
    if init.unreachable_since is None:
        return False
    at = init.unreachable_since + draft.job.spec.policy.lost_worker_s
    if draft.now < at:
        draft.wake(at)
    return draft.now >= at


def _clear(draft: PlanBuilder, init: InitPod) -> None:
    """Wait until a pod that failed or was deleted is removed: the next one has the same name."""
    if not draft.status.init_clearing:
        draft.update(init_clearing=True, init_failed_time=draft.now)
    lost_s = draft.job.spec.policy.lost_worker_s
    force_at = (draft.status.init_failed_time or 0.0) + lost_s
    if not init.deleting:
        draft.actions.append(DeleteInit(force=_is_lost(draft, init)))
    elif draft.now >= force_at or _is_lost(draft, init):
        draft.actions.append(DeleteInit(force=True))
    draft.wake(force_at if draft.now < force_at else draft.now + lost_s)


def _wait(draft: PlanBuilder, init: InitPod) -> None:
    """Give up a pod that cannot start (an image, a claim) after the start deadline; one without a node may wait."""
    limit = draft.job.spec.policy.start_deadline_s
    since = init.begun_at or init.created_at or draft.status.start_time
    if limit is None or since is None or init.phase is not WorkerPhase.PENDING or init.preparing:
        return
    if draft.now < since + limit:
        draft.wake(since + limit)
        return
    why = f": {init.message}" if init.message else ""
    if init.scheduled:
        _failed(draft, f"the initializer pod did not start within {limit:g} s{why}")
    else:
        _report_no_capacity(draft, f"the initializer pod has had no node for {limit:g} s{why}")


def _report_no_capacity(draft: PlanBuilder, message: str) -> None:
    known = draft.status.condition(ConditionType.INITIALIZED)
    if known is None or known.reason != reasons.UNSCHEDULABLE:
        draft.event(EventType.WARNING, reasons.UNSCHEDULABLE, message)
        draft.set_condition(ConditionType.INITIALIZED, False, reasons.UNSCHEDULABLE, message)


def _wake_for_start(draft: PlanBuilder, since: float) -> None:
    limit = draft.job.spec.policy.start_deadline_s
    if limit is not None:
        draft.wake(since + limit)
