"""Accounts for the time of a job: steps that were kept, and what was lost on what.

Time is counted when its use changes, when a new step is reported, and once a minute at most otherwise. Steps are those
that hub or launcher report, so that each boundary is as exact as the interval of the polls.
"""

import dataclasses
from typing import Any, NamedTuple

from megatronapp_common.job.api.progress import PAUSED, STARTING, TimeSpent, TimeUse
from megatronapp_common.job.api.status import TERMINAL_PHASES, Phase
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import report
from megatronapp_operator.plan.worker_history import micros

EVERY_S = 60.0
"""Shortest interval at which time is counted whose use has not changed."""
IN_STEPS = frozenset({TimeUse.TRAINED, TimeUse.CHECKPOINTS, TimeUse.SUSPENDED})
"""Uses to which a gang changes without losing the steps since the last one that was reported."""


class _WorkerTime(NamedTuple):
    """Time of workers besides those that train, summed over them."""

    until: float
    """When it was counted, in seconds since the epoch."""
    seconds: float
    gpu_seconds: float


def account(draft: PlanBuilder) -> None:
    """Count the time up to now. A served model has no steps."""
    if draft.job.spec.serves:
        return
    now, use = draft.now, _use(draft)
    spent = draft.status.time_spent
    if spent is None:
        draft.update(time_spent=TimeSpent(since=micros(now), use=use))
        return
    spent = _with_absent(draft, _with_spares(draft, spent))
    spent = _counted_steps(draft, spent)
    if spent.use is not use:
        spent = dataclasses.replace(_add(spent, _charged(draft, spent, use), now), use=use)
    elif use not in {None, TimeUse.TRAINED} and now >= spent.since + EVERY_S:
        spent = _add(spent, use, now)
    draft.update(time_spent=spent)


def _with_spares(draft: PlanBuilder, spent: TimeSpent) -> TimeSpent:
    """Count the time for which spares have held nodes."""
    number = sum(spare.scheduled and (spare.live or spare.occupies) for spare in draft.observed.spares)
    counted = _counted_workers(draft, number, before=spent.spares, since=spent.spares_since)
    if counted is None:
        return spent
    return dataclasses.replace(
        spent,
        spares=number,
        spares_since=counted.until,
        spare_seconds=micros(spent.spare_seconds + counted.seconds),
        spare_gpu_seconds=micros(spent.spare_gpu_seconds + counted.gpu_seconds),
    )


def _with_absent(draft: PlanBuilder, spent: TimeSpent) -> TimeSpent:
    """Count the time for which a smaller gang runs without workers."""
    runs = draft.status.running_time is not None and draft.status.phase not in TERMINAL_PHASES | {Phase.SUSPENDED}
    number = draft.job.spec.absent_workers if runs else 0
    counted = _counted_workers(draft, number, before=spent.absent, since=spent.absent_since)
    if counted is None:
        return spent
    return dataclasses.replace(
        spent,
        absent=number,
        absent_since=counted.until,
        absent_seconds=micros(spent.absent_seconds + counted.seconds),
        absent_gpu_seconds=micros(spent.absent_gpu_seconds + counted.gpu_seconds),
    )


def _counted_workers(draft: PlanBuilder, number: int, *, before: int, since: float | None) -> _WorkerTime | None:
    """Return the time of `before` workers since they were counted last; None if it is not counted now.

    It is counted when their number changes, and once a minute.
    """
    since = draft.now if since is None else since
    if number == before and (not number or draft.now < since + EVERY_S):
        return None
    seconds = before * max(0.0, draft.now - since)
    gpus = max((group.gpus_per_node for group in draft.job.spec.worker_groups), default=0)
    return _WorkerTime(until=micros(max(draft.now, since)), seconds=seconds, gpu_seconds=gpus * seconds)


def _use(draft: PlanBuilder) -> TimeUse | None:
    """Return the use of the time from now on; None: the job has ended."""
    status = draft.status
    if status.phase in TERMINAL_PHASES:
        return None
    if status.phase is Phase.SUSPENDED:
        return TimeUse.SUSPENDED
    if status.trains and status.current_progress is not None:
        states = {"saving": TimeUse.CHECKPOINTS, PAUSED: TimeUse.SUSPENDED}
        return states.get(status.current_progress.state, TimeUse.TRAINED)
    if status.attempt_time is not None and status.scheduled_time is None and draft.job.spec.gang:
        return TimeUse.QUEUEING
    if status.restarts or status.last_restart_time is not None:  # an end for growth is not counted
        return TimeUse.RESTARTS
    return TimeUse.QUEUEING if status.scheduled_time is None else TimeUse.STARTING


def _charged(draft: PlanBuilder, spent: TimeSpent, use: TimeUse | None) -> TimeUse | None:
    """Return what the time up to now is counted as, when its use changes.

    The time since the newest step of a gang that has failed is lost.
    """
    if spent.use is not TimeUse.TRAINED or use in IN_STEPS or draft.status.phase is Phase.SUCCEEDED:
        return spent.use
    return TimeUse.FAILURES


def _counted_steps(draft: PlanBuilder, spent: TimeSpent) -> TimeSpent:
    """Count the time of steps that were reported since the last one, or the loss of steps that are repeated."""
    page = draft.status.current_progress
    if page is None or (page.state == STARTING and page.iteration == 0):
        return spent
    if page.attempt != spent.attempt:
        return _resumed(spent, page.attempt, page.iteration)
    steps = page.iteration - spent.iteration
    if steps <= 0 or spent.use is not TimeUse.TRAINED:
        return dataclasses.replace(spent, iteration=max(spent.iteration, page.iteration))
    seconds = max(0.0, draft.now - spent.since)
    slow = min(seconds, steps * report.seconds_per_step(draft.status))
    made = dataclasses.replace(spent, slow=micros(spent.slow + slow), since=micros(spent.since + slow))
    made = _add(made, TimeUse.TRAINED, draft.now)
    return dataclasses.replace(
        made,
        iteration=page.iteration,
        steps=spent.steps + steps,
        step_seconds=micros(spent.step_seconds + seconds - slow),
    )


def _resumed(spent: TimeSpent, attempt: int, iteration: int) -> TimeSpent:
    """Begin to count steps of an attempt; those of the one before that it repeats were lost."""
    repeated = max(0, spent.iteration - iteration) if spent.attempt >= 0 else 0
    each = spent.step_seconds / spent.steps if spent.steps else 0.0
    lost = min(spent.trained, repeated * each)
    return dataclasses.replace(
        spent,
        attempt=attempt,
        iteration=iteration,
        steps=0,
        step_seconds=0.0,
        trained=micros(spent.trained - lost),
        failures=micros(spent.failures + lost),
    )


def _add(spent: TimeSpent, use: TimeUse | None, now: float) -> TimeSpent:
    """Count the time up to now as `use`; None: as nothing, the job has ended."""
    since = micros(max(now, spent.since))
    if use is None:
        return dataclasses.replace(spent, since=since)
    changes: dict[str, Any] = {use.value: micros(getattr(spent, use.value) + since - spent.since)}
    return dataclasses.replace(spent, since=since, **changes)
