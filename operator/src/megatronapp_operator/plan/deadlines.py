"""Deadlines of the whole job and of progress; that of a gang's start is in `placement`."""

from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.draft import Draft
from megatronapp_operator.plan.restart import attempt_failed, fail_job
from megatronapp_operator.plan.status import ConditionType, Failure, FailureAction


def active(draft: Draft) -> bool:
    """The job has lasted too long: it fails."""
    limit, start = draft.job.spec.policy.active_deadline_s, draft.status.start_time
    if limit is None or start is None or draft.status.is_true(ConditionType.FAILURE_TARGET):
        return False
    if draft.now < start + limit:
        draft.wake(start + limit)
        return False
    fail_job(draft, reasons.DEADLINE_EXCEEDED, f"the job was active for more than {limit:g} s")
    return False


def progress(draft: Draft) -> bool:
    """No new iteration for too long: the gang hangs and is restarted."""
    limit, running = draft.job.spec.policy.progress_deadline_s, draft.status.running_time
    if limit is None or running is None:
        return False
    since = max(running, draft.status.progress_time or 0.0, draft.observed.since)
    if draft.now < since + limit:
        draft.wake(since + limit)
        return False
    message = f"no progress for {limit:g} s{_place(draft)}"
    draft.set_condition(ConditionType.STALLED, True, reasons.PROGRESS_DEADLINE_EXCEEDED, message)
    attempt_failed(draft, _failure(draft, reasons.PROGRESS_DEADLINE_EXCEEDED, message, FailureAction.RESTART))
    return True


def _place(draft: Draft) -> str:
    found = draft.status.progress
    return "" if found is None else f", last seen at iteration {found.iteration}"


def _failure(draft: Draft, reason: str, message: str, action: FailureAction) -> Failure:
    return Failure(time=draft.now, attempt=draft.status.attempt, reason=reason, message=message, action=action)
