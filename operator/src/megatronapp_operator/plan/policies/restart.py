"""Restart policy: back-off, budget and its reset, and the two ways in which an attempt ends badly."""

import dataclasses
import hashlib

from megatronapp_common.job.api.status import MAX_FAILURES, ConditionType, Failure, FailureAction, Phase, Status
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import exclusion
from megatronapp_operator.plan.spec import Backoff
from megatronapp_operator.plan.worker_history import micros

COUNTED = frozenset({FailureAction.RESTART, FailureAction.EXCLUDE_AND_RESTART})
"""Actions that count against the budget of restarts."""
ORDERED = frozenset({reasons.SLOW_NODE_SWAPPED, reasons.DATA_PARALLEL_GROWS})
"""Reasons of attempts that the operator let end with a checkpoint."""
RELEASE_BACKOFF = Backoff(initial_s=15.0, max_s=600.0)
"""Pause after a gang was released, in seconds, multiplied by 0.5 to 1.5."""


def backoff_s(backoff: Backoff, counted: int) -> float:
    """Return the seconds to wait before restart number `counted` of the budget (from 1; 0: a preemption)."""
    exponent = min(max(counted - 1, 0), 64)  # 2 ** 64 seconds pass every cap, and floats do not overflow
    return min(backoff.max_s, backoff.initial_s * backoff.factor**exponent)


def restart_at(draft: PlanBuilder) -> float:
    """Return when the next gang may be created."""
    return max(paused_until(draft), release_at(draft))


def paused_until(draft: PlanBuilder) -> float:
    """Return when the pause after the last failure is over; that of a gang that was released is not part of it."""
    policy, status = draft.job.spec.policy, draft.status
    if status.last_restart_time is None:
        return 0.0
    if status.failures and status.failures[-1].reason in ORDERED:  # nothing has failed
        return status.last_restart_time
    lately = unbudgeted_failures_since(status, status.last_restart_time - policy.reset_after_s)
    return status.last_restart_time + backoff_s(policy.backoff, max(status.restarts_towards_max, lately))


def unbudgeted_failures_since(status: Status, since: float) -> int:
    """Return how many of the recorded failures since then were outside the budget; an ordered end is none of them.

    No budget ends a job that meets such failures again and again, so at least the pause must grow.
    """
    recent = (failure for failure in status.failures if failure.time > since and failure.reason not in ORDERED)
    return sum(failure.action is FailureAction.RESTART_IGNORE_MAX for failure in recent)


def release_at(draft: PlanBuilder) -> float:
    """Return when a released gang may be created again: later each time, and at another time than other jobs."""
    status = draft.status
    if not status.released or status.released_time is None:
        return draft.now
    pause = backoff_s(RELEASE_BACKOFF, status.released) * (0.5 + jitter(draft.job.spec.uid, status.attempt))
    return status.released_time + pause


def jitter(uid: str, attempt: int) -> float:
    """Return a number from 0 up to 1 that is the same for every plan of an attempt, and differs between jobs."""
    digest = hashlib.sha256(f"{uid}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4]) / 2**32


def reset_budget(draft: PlanBuilder, until: float) -> None:
    """Restore the whole budget after a long healthy run of this attempt that lasted until `until`."""
    status = draft.status
    if status.running_time is None or status.restarts_towards_max == 0:
        return
    reset_at = status.running_time + draft.job.spec.policy.reset_after_s
    if until >= reset_at:
        draft.update(restarts_towards_max=0)
    elif draft.now < reset_at:
        draft.wake(reset_at)


def attempt_failed(draft: PlanBuilder, failure: Failure) -> None:
    """Record the failure and do what it asks for, within the budget."""
    spent = draft.status.restarts_towards_max >= draft.job.spec.policy.max_restarts
    if failure.action in COUNTED and spent:
        failure = dataclasses.replace(failure, action=FailureAction.FAIL_JOB)
        record(draft, failure)
        limit = draft.job.spec.policy.max_restarts
        fail_job(draft, reasons.BACKOFF_LIMIT_EXCEEDED, f"restarted {limit} times already; {failure.message}")
        return
    record(draft, failure)
    if failure.action is FailureAction.FAIL_JOB:
        fail_job(draft, failure.reason, failure.message)
        return
    _restart(draft, failure)


def fail_job(draft: PlanBuilder, reason: str, message: str) -> None:
    """Decide that the job fails; it *has* failed once no worker is left."""
    draft.set_condition(ConditionType.FAILURE_TARGET, True, reason, message)


def next_attempt(draft: PlanBuilder) -> None:
    """Begin the next attempt; workers of the old one are stale from now on."""
    holding_since = draft.status.holding_time
    holding_s = 0.0 if holding_since is None else max(0.0, draft.now - holding_since)
    draft.update(
        active_s=micros(draft.status.active_s + holding_s),
        attempt=draft.status.attempt + 1,
        attempt_time=None,
        holding_time=None,
        unplaced_time=None,
        scheduled_time=None,
        running_time=None,
        hung_ranks=(),
        succeeded=(),
        rank_zero=None,
        ended=(),
    )


def record(draft: PlanBuilder, failure: Failure) -> None:
    """Record a failure in the status and as an Event."""
    draft.update(failures=(*draft.status.failures, failure)[-MAX_FAILURES:])
    draft.event(EventType.WARNING, failure.reason, failure.message)


def _restart(draft: PlanBuilder, failure: Failure) -> None:
    """Begin the next attempt after a failure. A change of the gang's size is no restart, in either direction."""
    counts = failure.action in COUNTED
    status = draft.status
    if failure.action is FailureAction.EXCLUDE_AND_RESTART and failure.node is not None:
        exclusion.exclude(draft, failure.node, failure.reason)
    draft.update(
        phase=Phase.RESTARTING,
        restarts=status.restarts + int(failure.reason != reasons.DATA_PARALLEL_GROWS),
        restarts_towards_max=status.restarts_towards_max + int(counts),
        last_restart_time=draft.now,
        released=0,
    )
    next_attempt(draft)
    draft.set_condition(ConditionType.RESTARTING, True, failure.reason, failure.message)
    draft.clear_condition(ConditionType.RUNNING, failure.reason, failure.message)
    pause = restart_at(draft) - draft.now
    how = "in place where pods are sound" if draft.job.spec.policy.in_place else "when the old workers are deleted"
    message = f"attempt {draft.status.attempt} starts in {pause:.0f} s, {how}"
    draft.event(EventType.NORMAL, "Restarting", message)
