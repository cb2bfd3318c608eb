"""The ends of a job: terminal guard, failing, deletion, stop on request, suspension."""

from megatronapp_operator.plan.actions import DeleteHub, EventType
from megatronapp_operator.plan.draft import Draft
from megatronapp_operator.plan.observed import HubPhase
from megatronapp_operator.plan.restart import fail_job, next_attempt
from megatronapp_operator.plan.status import TERMINAL_PHASES, ConditionType, Phase


def guard_terminal(draft: Draft) -> bool:
    """A job that has ended never starts anything again: only cleaning up is left."""
    if draft.status.phase not in TERMINAL_PHASES:
        return False
    for worker in draft.live:
        draft.delete(worker, 0 if _forced(draft) else draft.job.spec.policy.failed_grace_s)
    _retire_hub(draft)
    return True


def delete_job(draft: Draft) -> bool:
    """The object is going: everything of it goes, the hub at once."""
    if not draft.job.deletion_requested:
        return False
    for worker in draft.observed.workers:
        draft.delete(worker, 0 if _forced(draft) else draft.job.spec.policy.grace_s)
    _delete_hub(draft)
    return True


def stop_on_request(draft: Draft) -> bool:
    """Somebody asked the job to end now: it fails, after a checkpoint where there is time for one."""
    stop = draft.job.stop
    if stop is not None and not draft.status.is_true(ConditionType.FAILURE_TARGET):
        fail_job(draft, stop.reason, stop.message)
        draft.event(EventType.NORMAL, stop.reason, stop.message)
    return False


def finish_failing(draft: Draft) -> bool:
    """Stop the workers of a job that is going to fail, and fail it when none is left."""
    target = draft.status.condition(ConditionType.FAILURE_TARGET)
    if target is None or not target.status:
        return False
    for worker in draft.live:
        draft.delete(worker, _failing_grace_s(draft))
    if draft.live:
        return True
    end(draft, Phase.FAILED, ConditionType.FAILED, target.reason, target.message)
    draft.event(EventType.WARNING, "Failed", target.message)
    _retire_hub(draft)
    return True


def complete(draft: Draft) -> None:
    """All workers have succeeded."""
    message = f"{draft.job.spec.all_workers_words} ended with success"
    end(draft, Phase.SUCCEEDED, ConditionType.COMPLETE, "AllWorkersSucceeded", message)
    draft.event(EventType.NORMAL, "Completed", message)
    _retire_hub(draft)


def end(draft: Draft, phase: Phase, kind: ConditionType, reason: str, message: str) -> None:
    """Enter a terminal phase."""
    draft.update(phase=phase, completion_time=draft.now)
    draft.set_condition(kind, True, reason, message)
    for gone in (ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.SUSPENDED, ConditionType.STALLED):
        draft.clear_condition(gone, reason, message)


def suspend(draft: Draft) -> bool:
    """Stop the gang, keep the job; when it is resumed, a new attempt starts outside the budget."""
    if not draft.job.spec.suspend:
        draft.clear_condition(ConditionType.SUSPENDED, "Resumed", "the job was resumed")
        return False
    for worker in draft.observed.workers:
        draft.delete(worker, draft.job.spec.policy.grace_s)
    if draft.status.phase is Phase.SUSPENDED:
        return True
    if draft.status.attempt_time is not None:
        next_attempt(draft)
    draft.update(phase=Phase.SUSPENDED, start_time=None, last_restart_time=None)
    draft.set_condition(ConditionType.SUSPENDED, True, "Suspended", "spec.suspend is true")
    for gone in (ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.STALLED):
        draft.clear_condition(gone, "Suspended", "the job is suspended")
    draft.event(EventType.NORMAL, "Suspended", "the workers are being stopped")
    return True


def _forced(draft: Draft) -> bool:
    return draft.job.stop is not None and draft.job.stop.force


def _failing_grace_s(draft: Draft) -> float:
    if _forced(draft):
        return 0.0
    policy = draft.job.spec.policy
    return policy.grace_s if draft.job.stop is not None else policy.failed_grace_s


def _retire_hub(draft: Draft) -> None:
    """Keep the pages open for a while, unless somebody asked for the end."""
    assert draft.status.completion_time is not None
    until = draft.status.completion_time + draft.job.spec.hub_retain_s
    if draft.job.stop is not None or draft.now >= until:
        _delete_hub(draft)
    elif _hub_lives(draft):
        draft.wake(until)


def _delete_hub(draft: Draft) -> None:
    hub = draft.observed.hub
    if hub is not None and _hub_lives(draft) and not hub.deleting:
        draft.actions.append(DeleteHub())


def _hub_lives(draft: Draft) -> bool:
    return draft.observed.hub is not None and draft.observed.hub.phase is not HubPhase.ENDED
