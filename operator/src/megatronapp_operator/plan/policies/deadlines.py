"""Deadlines of the whole job, of gathering and of progress; that of the start of a gang is in `placement`.

A job makes no progress if hub or launcher report none. While neither can be reached (because of their network, ours, or
a stopped operator), nothing is known: that time does not count, and the gang continues. With or without a deadline,
users get an Event after `SILENCE_S`. Only after both were unreachable for `unheard_s` beyond the deadline the gang is
restarted, with time for a checkpoint and outside the budget: a gang that hangs must not occupy its nodes without limit,
and one that trains loses little.
"""

import dataclasses

from megatronapp_common.job.api.status import ConditionType, Failure, FailureAction
from megatronapp_operator.plan import failure_rules, reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies.restart import attempt_failed, fail_job
from megatronapp_operator.plan.policies.user_actions import is_paused

NAMED = 8
"""Most workers that a message names."""
POLL_AGAIN_S = 15.0
"""Seconds between checks whether hub or launcher answer again: an answer without a change triggers no reconcile."""
SILENCE_S = 600.0
"""Seconds without an answer of hub or launcher after which the progress of a running gang is reported as unknown."""

SILENCE = "neither hub nor launcher answers the operator"


def active(draft: PlanBuilder) -> bool:
    """Fail the job if it has been active for too long."""
    limit, start = draft.job.spec.policy.active_deadline_s, _active_since(draft)
    if limit is None or start is None or draft.status.is_true(ConditionType.FAILURE_TARGET):
        return False
    if draft.now < start + limit:
        draft.wake(start + limit)
        return False
    fail_job(draft, reasons.DEADLINE_EXCEEDED, f"the job was active for more than {limit:g} s")
    return False


def _active_since(draft: PlanBuilder) -> float | None:
    """Return the time at which a job that was always active would have begun; None: it holds no nodes now.

    A job that a queue places is active only while it holds nodes: waiting for them, at first or after a preemption,
    does not count.
    """
    if not draft.job.spec.gang:
        return draft.status.start_time
    holding = draft.status.holding_time
    return None if holding is None else holding - draft.status.active_s


def gathering(draft: PlanBuilder) -> bool:
    """Fail the attempt if all workers run but some cannot reach the rendezvous within the start deadline.

    Launchers wait longer than this, because they do not know how long the others prepare. Nothing is judged by an
    answer from before the deadline, nor while the cluster disrupts one of the gang: that is no failure of the job and
    has other deadlines.
    """
    limit, running, missing = draft.job.spec.policy.start_deadline_s, draft.status.running_time, draft.observed.missing
    if limit is None or running is None or draft.status.current_progress is not None:
        return False
    due, contact = running + limit, draft.observed.last_contact
    if not missing:
        return False
    if draft.now < due or (contact is not None and contact < due) or any(worker.taken for worker in draft.gang):
        draft.wake(max(due, draft.now + POLL_AGAIN_S))
        return False
    named = ", ".join(map(str, missing[:NAMED])) + (" and others" if len(missing) > NAMED else "")
    message = f"all workers run, and after {limit:g} s worker 0 still waits for worker {named}: they cannot reach it"
    failure = _failure(draft, reasons.NOT_GATHERED, message, FailureAction.RESTART)
    node = next((worker.node for worker in draft.gang if worker.index == missing[0]), None)
    attempt_failed(draft, failure_rules.judged_lost(draft, dataclasses.replace(failure, worker=missing[0], node=node)))
    return True


def silence(draft: PlanBuilder) -> bool:
    """Report that neither hub nor launcher has answered for `SILENCE_S`, also of a gang that has no deadline.

    The gang may well be training or serving, so this restarts nothing.
    """
    running, contact = draft.status.running_time, draft.observed.last_contact
    if running is None or contact is None or draft.observed.locked:
        return False
    known = draft.status.condition(ConditionType.STALLED)
    if known is not None and known.status:
        if known.reason == reasons.PROGRESS_UNKNOWN:
            draft.wake(draft.now + POLL_AGAIN_S)
        return False
    due = max(running, contact, draft.observed.since) + SILENCE_S
    if draft.now < due:
        draft.wake(due)
        return False
    message = f"for {SILENCE_S:g} s {SILENCE}, so it is not known how far the job is"
    draft.set_condition(ConditionType.STALLED, True, reasons.PROGRESS_UNKNOWN, message)
    draft.event(EventType.WARNING, reasons.PROGRESS_UNKNOWN, message)
    return False


def progress(draft: PlanBuilder) -> bool:
    """Restart a gang that has not begun a new iteration for too long.

    In a pause the time counts from the last answer of hub or launcher, so that only their silence ends it.
    """
    limit, running = draft.job.spec.policy.progress_deadline_s, draft.status.running_time
    if limit is None or running is None:
        return False
    since = max(running, draft.status.progress_time or 0.0, draft.observed.since)
    contact = draft.observed.last_contact
    if is_paused(draft):
        if contact is None:
            return False
        since = max(since, contact)
    due = since + limit
    if draft.now < due:
        draft.wake(due)
        return False
    if contact is not None and contact < due:
        return _unknown(draft, limit, until=due + draft.job.spec.policy.unheard_s)
    message = f"no progress for {limit:g} s{_place(draft)}"
    draft.set_condition(ConditionType.STALLED, True, reasons.PROGRESS_DEADLINE_EXCEEDED, message)
    attempt_failed(draft, _failure(draft, reasons.PROGRESS_DEADLINE_EXCEEDED, message, FailureAction.RESTART))
    return True


def _unknown(draft: PlanBuilder, limit: float, *, until: float) -> bool:
    """Report that progress is not known, and restart the gang if that lasts until `until`.

    Without their key hub and launcher stay unreadable as long as the attempt lasts: a restart for that would discard
    the steps of a gang that most likely trains. `report.tokens` reports it instead.
    """
    if draft.observed.locked:
        return False
    if not draft.status.is_true(ConditionType.STALLED):
        message = f"no progress was received for {limit:g} s, because {SILENCE}; the deadline waits for them"
        draft.set_condition(ConditionType.STALLED, True, reasons.PROGRESS_UNKNOWN, message)
        draft.event(EventType.WARNING, reasons.PROGRESS_UNKNOWN, message)
    if draft.now < until:
        draft.wake(min(draft.now + POLL_AGAIN_S, until))
        return False
    message = f"no progress was received for {limit + draft.job.spec.policy.unheard_s:g} s: {SILENCE}{_place(draft)}"
    action = FailureAction.RESTART_IGNORE_MAX
    attempt_failed(draft, _failure(draft, reasons.PROGRESS_UNKNOWN, message, action))
    return True


def _place(draft: PlanBuilder) -> str:
    found = draft.status.progress
    return "" if found is None else f", last seen at iteration {found.iteration}"


def _failure(draft: PlanBuilder, reason: str, message: str, action: FailureAction) -> Failure:
    return Failure(time=draft.now, attempt=draft.status.attempt, reason=reason, message=message, action=action)
