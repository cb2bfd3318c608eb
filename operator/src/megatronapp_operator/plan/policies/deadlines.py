"""Deadlines of the whole job, of gathering and of progress; that of a gang's start is in `placement`.

A job makes no progress if somebody who knows says so. While neither hub nor launcher can be asked (their network, ours,
an operator that is away), nothing is known: that time does not count, people are told, and the gang goes on. Only when
nobody could be asked for `unheard_s` beyond the deadline it is restarted, with time for a checkpoint and outside of the
budget: a gang that hangs must not hold its machines for ever, and one that trains loses little.
"""

import dataclasses

from megatronapp_operator.plan import failure_rules, reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies.restart import attempt_failed, fail_job
from megatronapp_operator.plan.status import ConditionType, Failure, FailureAction

NAMED = 8
"""So many workers are named in a message."""
POLL_AGAIN_S = 15.0
"""How often somebody looks whether hub or launcher have answered again: an answer without news wakes nobody."""

SILENCE = "neither hub nor launcher answers the operator"


def active(draft: PlanBuilder) -> bool:
    """The job has lasted too long: it fails."""
    limit, start = draft.job.spec.policy.active_deadline_s, _active_since(draft)
    if limit is None or start is None or draft.status.is_true(ConditionType.FAILURE_TARGET):
        return False
    if draft.now < start + limit:
        draft.wake(start + limit)
        return False
    fail_job(draft, reasons.DEADLINE_EXCEEDED, f"the job was active for more than {limit:g} s")
    return False


def _active_since(draft: PlanBuilder) -> float | None:
    """When a job that was always active would have begun. One that a queue places is active while it holds machines:
    what it waits for them, at first or after a preemption, is not its time. None: it holds none now."""
    if not draft.job.spec.gang:
        return draft.status.start_time
    holding = draft.status.holding_time
    return None if holding is None else holding - draft.status.active_s


def gathering(draft: PlanBuilder) -> bool:
    """All workers run, and some do not come to the one that gathers them: they cannot reach it.

    Launchers wait longer than this, because they do not know how long the others prepare. Nothing is judged by an
    answer from before the deadline, nor while the cluster takes one of the gang away: that is nobody's failure, and has
    deadlines of its own.
    """
    limit, running, missing = draft.job.spec.policy.start_deadline_s, draft.status.running_time, draft.observed.missing
    if limit is None or running is None or draft.status.current_progress is not None:
        return False
    due, heard = running + limit, draft.observed.last_contact
    if not missing:
        return _unheard(draft, limit, since=max(running, draft.observed.since))
    if draft.now < due or (heard is not None and heard < due) or any(one.taken for one in draft.gang):
        draft.wake(max(due, draft.now + POLL_AGAIN_S))
        return False
    named = ", ".join(map(str, missing[:NAMED])) + (" and others" if len(missing) > NAMED else "")
    message = f"all workers run, and after {limit:g} s worker 0 still misses worker {named}: they do not reach it"
    failure = _failure(draft, reasons.NOT_GATHERED, message, FailureAction.RESTART)
    node = next((one.node for one in draft.gang if one.index == missing[0]), None)
    attempt_failed(draft, failure_rules.judged_lost(draft, dataclasses.replace(failure, worker=missing[0], node=node)))
    return True


def _unheard(draft: PlanBuilder, limit: float, *, since: float) -> bool:
    """Nobody has ever answered: people are told. The gang may well train, so it is left to its launchers' own limit."""
    heard = draft.observed.last_contact
    if heard is None or heard >= since or draft.status.is_true(ConditionType.STALLED) or draft.observed.locked:
        return False
    if draft.now < since + limit:
        draft.wake(since + limit)
        return False
    message = f"all workers run, and for {limit:g} s {SILENCE}, so nobody knows whether they have found each other"
    draft.set_condition(ConditionType.STALLED, True, reasons.PROGRESS_UNKNOWN, message)
    draft.event(EventType.WARNING, reasons.PROGRESS_UNKNOWN, message)
    return False


def progress(draft: PlanBuilder) -> bool:
    """No new iteration for too long: the gang hangs and is restarted."""
    limit, running = draft.job.spec.policy.progress_deadline_s, draft.status.running_time
    if limit is None or running is None:
        return False
    since = max(running, draft.status.progress_time or 0.0, draft.observed.since)
    due, heard = since + limit, draft.observed.last_contact
    if draft.now < due:
        draft.wake(due)
        return False
    if heard is not None and heard < due:
        return _unknown(draft, limit, until=due + draft.job.spec.policy.unheard_s)
    message = f"no progress for {limit:g} s{_place(draft)}"
    draft.set_condition(ConditionType.STALLED, True, reasons.PROGRESS_DEADLINE_EXCEEDED, message)
    attempt_failed(draft, _failure(draft, reasons.PROGRESS_DEADLINE_EXCEEDED, message, FailureAction.RESTART))
    return True


def _unknown(draft: PlanBuilder, limit: float, *, until: float) -> bool:
    """Nobody has said since the deadline that the gang stands still.

    Where hub and launcher cannot be read for want of their key, they stay so as long as the attempt lasts: a restart
    for that would throw away the steps of a gang that most likely trains. `report.tokens` says so.
    """
    if draft.observed.locked:
        return False
    if not draft.status.is_true(ConditionType.STALLED):
        message = f"no progress was heard of for {limit:g} s, because {SILENCE}; the deadline waits for them"
        draft.set_condition(ConditionType.STALLED, True, reasons.PROGRESS_UNKNOWN, message)
        draft.event(EventType.WARNING, reasons.PROGRESS_UNKNOWN, message)
    if draft.now < until:
        draft.wake(min(draft.now + POLL_AGAIN_S, until))
        return False
    message = f"no progress was heard of for {limit + draft.job.spec.policy.unheard_s:g} s: {SILENCE}{_place(draft)}"
    action = FailureAction.RESTART_IGNORE_MAX
    attempt_failed(draft, _failure(draft, reasons.PROGRESS_UNKNOWN, message, action))
    return True


def _place(draft: PlanBuilder) -> str:
    found = draft.status.progress
    return "" if found is None else f", last seen at iteration {found.iteration}"


def _failure(draft: PlanBuilder, reason: str, message: str, action: FailureAction) -> Failure:
    return Failure(time=draft.now, attempt=draft.status.attempt, reason=reason, message=message, action=action)
