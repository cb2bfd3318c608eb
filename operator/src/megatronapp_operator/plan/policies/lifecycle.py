"""The ends of a job: terminal guard, failing, deletion, stop on request, suspension."""

import dataclasses

from megatronapp_common.job.api.status import TERMINAL_PHASES, ConditionType, Failure, FailureAction, Phase
from megatronapp_operator.plan import outcome, reasons
from megatronapp_operator.plan.actions import DeleteHub, DeleteJob, EventType
from megatronapp_operator.plan.observed import HubPhase, Worker
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies.initialize import stop_init
from megatronapp_operator.plan.policies.restart import next_attempt, record
from megatronapp_operator.plan.spec import CleanPodPolicy, StopRequest


def guard_terminal(draft: PlanBuilder) -> bool:
    """Clean up after a job that has ended, which never starts anything again."""
    if draft.status.phase not in TERMINAL_PHASES:
        return False
    policy = draft.job.spec.policy
    all_go = policy.clean is CleanPodPolicy.ALL
    for worker in draft.observed.pods if all_go else _holding(draft):
        draft.delete(worker, 0 if _forced(draft) else policy.failed_grace_s)
    stop_init(draft, ended_too=all_go)
    _retire_hub(draft)
    _expire(draft)
    return True


def _expire(draft: PlanBuilder) -> None:
    """Delete the job object once its time to live is over and none of its pods runs."""
    ttl_s = draft.job.spec.policy.ttl_s
    if ttl_s is None or _holding(draft):
        return
    at = (draft.status.completion_time or 0.0) + ttl_s
    if draft.now < at:
        draft.wake(at)
    else:
        draft.actions.append(DeleteJob())


def _holding(draft: PlanBuilder) -> list[Worker]:
    """Return workers that the policy removes from their nodes.

    Those are the ones that run, and with any policy but None those that occupy a node for an agent alone, which has not
    noticed the end of the job.
    """
    agents_too = draft.job.spec.policy.clean is not CleanPodPolicy.NONE
    return [worker for worker in draft.observed.pods if worker.live or (agents_too and worker.occupies)]


def delete_job(draft: PlanBuilder) -> bool:
    """Delete everything of a job whose object is being deleted, the hub at once."""
    if not draft.job.deletion_requested:
        return False
    for worker in draft.observed.pods:
        draft.delete(worker, 0 if _forced(draft) else draft.job.spec.policy.grace_s)
    stop_init(draft, ended_too=True)
    _delete_hub(draft)
    return True


def guard_stopped(draft: PlanBuilder) -> bool:
    """Keep a stopped job stopped until it is planned without the request to stop."""
    if draft.job.stop is None or draft.status.phase is not Phase.SUSPENDED:
        return False
    for worker in draft.live:
        draft.delete(worker, _stopping_grace_s(draft))
    stop_init(draft)
    _delete_hub(draft)
    return True


def stop_on_request(draft: PlanBuilder) -> bool:
    """Stop the workers on request: the job is suspended if its ranks could save or nothing ran; if not, it fails.

    A job that is failing already continues to fail.
    """
    stop = draft.job.stop
    if stop is None or draft.status.is_true(ConditionType.FAILURE_TARGET):
        return False
    suspended = draft.status.condition(ConditionType.SUSPENDED)
    if suspended is None or suspended.reason != stop.reason:
        draft.set_condition(ConditionType.SUSPENDED, False, stop.reason, stop.message)
        draft.event(EventType.NORMAL, stop.reason, stop.message)
    for worker in draft.live:
        draft.delete(worker, _stopping_grace_s(draft))
    stop_init(draft)
    if not draft.live:
        _end_stopping(draft, stop)
    return True


def _end_stopping(draft: PlanBuilder, stop: StopRequest) -> None:
    """End the job by the outcomes of its workers, none of which is left."""
    failure = _stop_failure(draft)
    if failure is not None:
        record(draft, failure)
        message = f"{stop.message}; {failure.message}"
        end(draft, Phase.FAILED, ConditionType.FAILED, stop.reason, message)
        draft.event(EventType.WARNING, "Failed", message)
        _retire_hub(draft)
    elif draft.gang and outcome.succeeded(draft.gang):
        message = f"{draft.job.spec.all_workers_text} ended with success"
        complete(draft, reasons.ALL_WORKERS_SUCCEEDED, message)
    else:
        _rest(draft, stop.reason, stop.message)
        draft.event(
            EventType.NORMAL, reasons.SUSPENDED, f"{stop.message}; it continues where it stopped when started again"
        )
        _delete_hub(draft)


def _stop_failure(draft: PlanBuilder) -> Failure | None:
    """Return why the workers did not stop in order; None if they did, or if none of this attempt was started yet."""
    spec, status = draft.job.spec, draft.status
    unsaved = [worker for worker in outcome.failed(draft.gang) if not outcome.preempted([worker])]
    missing = [] if status.attempt_time is None else draft.missing_indices
    if unsaved:
        failure = outcome.failure_of(unsaved[0], spec.name, draft.now, FailureAction.FAIL_JOB)
    elif missing:
        failure = outcome.lost_workers_failure(missing, status.attempt, draft.now)
    else:
        return None
    return dataclasses.replace(failure, action=FailureAction.FAIL_JOB)


def _rest(draft: PlanBuilder, reason: str, message: str) -> None:
    draft.update(phase=Phase.SUSPENDED)
    draft.set_condition(ConditionType.SUSPENDED, True, reason, message)
    for outdated in (
        ConditionType.PODS_SCHEDULED, ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.STALLED,
        ConditionType.SPARES_READY, ConditionType.DATA_PARALLEL_REDUCED,
    ):  # fmt: skip
        draft.clear_condition(outdated, reason, message)


def finish_failing(draft: PlanBuilder) -> bool:
    """Stop the workers of a job that is going to fail, and fail it when none is left."""
    target = draft.status.condition(ConditionType.FAILURE_TARGET)
    if target is None or not target.status:
        return False
    for worker in draft.live:
        draft.delete(worker, _failing_grace_s(draft))
    stop_init(draft)
    if draft.live:
        return True
    end(draft, Phase.FAILED, ConditionType.FAILED, target.reason, target.message)
    draft.event(EventType.WARNING, "Failed", target.message)
    _retire_hub(draft)
    return True


def complete(draft: PlanBuilder, reason: str, message: str) -> None:
    """Mark the job as succeeded, and withdraw a request to stop that was too late to interrupt anything."""
    end(draft, Phase.SUCCEEDED, ConditionType.COMPLETE, reason, message)
    if draft.status.condition(ConditionType.SUSPENDED) is not None:
        draft.set_condition(ConditionType.SUSPENDED, False, reason, message)
    draft.event(EventType.NORMAL, "Completed", message)
    _retire_hub(draft)


def end(draft: PlanBuilder, phase: Phase, kind: ConditionType, reason: str, message: str) -> None:
    """Enter a terminal phase."""
    draft.update(phase=phase, completion_time=draft.now)
    draft.set_condition(kind, True, reason, message)
    for outdated in (
        ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.SUSPENDED, ConditionType.STALLED,
        ConditionType.SPARES_READY, ConditionType.DATA_PARALLEL_REDUCED,
    ):  # fmt: skip
        draft.clear_condition(outdated, reason, message)


def suspend(draft: PlanBuilder) -> bool:
    """Stop the gang, keep the job; when it is resumed, a new attempt starts outside the budget."""
    if not draft.job.spec.suspend:
        return False
    for worker in draft.observed.pods:
        draft.delete(worker, draft.job.spec.policy.grace_s)
    stop_init(draft)
    if draft.status.phase is Phase.SUSPENDED:
        _retire_hub(draft, since=_suspended_since(draft))
        return True
    _forget_gang(draft)
    _rest(draft, reasons.SUSPENDED, "spec.suspend is true")
    draft.event(EventType.NORMAL, reasons.SUSPENDED, "the workers are being stopped")
    return True


def _suspended_since(draft: PlanBuilder) -> float:
    condition = draft.status.condition(ConditionType.SUSPENDED)
    return draft.now if condition is None else condition.since


def resume(draft: PlanBuilder) -> bool:
    """Resume a suspended job with a new attempt, whose clocks start at zero."""
    if draft.status.phase is Phase.SUSPENDED and not draft.job.spec.suspend:
        _forget_gang(draft)
        draft.update(phase=Phase.PENDING)
        draft.clear_condition(ConditionType.SUSPENDED, reasons.RESUMED, "the job was resumed")
    return False


def _forget_gang(draft: PlanBuilder) -> None:
    """Make what ran stale; its time does not count any more."""
    if draft.status.attempt_time is not None:
        next_attempt(draft)
    draft.update(start_time=None, active_s=0.0, last_restart_time=None, released=0, denied_time=None, gang_size=None)


def _forced(draft: PlanBuilder) -> bool:
    return draft.job.stop is not None and draft.job.stop.force


def _stopping_grace_s(draft: PlanBuilder) -> float:
    return 0.0 if _forced(draft) else draft.job.spec.policy.grace_s


def _failing_grace_s(draft: PlanBuilder) -> float:
    """Return the seconds to stop: a gang past its deadline is healthy and can save, one that has failed cannot."""
    target = draft.status.condition(ConditionType.FAILURE_TARGET)
    well = target is not None and target.reason == reasons.DEADLINE_EXCEEDED
    return _stopping_grace_s(draft) if well or draft.job.stop is not None else draft.job.spec.policy.failed_grace_s


def _retire_hub(draft: PlanBuilder, *, since: float | None = None) -> None:
    """Keep the hub for a while after the end or `since`, unless a user requested the end."""
    ended = draft.status.completion_time if since is None else since
    assert ended is not None
    until = ended + draft.job.spec.hub_retain_s
    if draft.job.stop is not None or draft.now >= until:
        _delete_hub(draft)
    elif _hub_lives(draft):
        draft.wake(until)


def _delete_hub(draft: PlanBuilder) -> None:
    hub = draft.observed.hub
    if hub is not None and _hub_lives(draft) and not hub.deleting:
        draft.actions.append(DeleteHub())


def _hub_lives(draft: PlanBuilder) -> bool:
    return draft.observed.hub is not None and draft.observed.hub.phase is not HubPhase.ENDED
