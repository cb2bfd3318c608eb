"""Spares: workers beyond the gang that wait, and take the places of workers whose pods do not continue.

Which spare takes which place is decided once, when an attempt begins, and is written into the status before any pod
gets its order: an operator that starts in between repeats the same orders. If a spare is lost before its order, the
attempt has failed, because worker 0 may have been its place and the others have been given its address.

Spares are created while the whole gang runs, so that they never take a node or a quota from it.
"""

from collections.abc import Collection, Iterator

from megatronapp_common.job.api.status import ConditionType, Failure, FailureAction, Takeover
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import CreateWorker, EventType, RestartWorker
from megatronapp_operator.plan.observed import Worker, WorkerPhase
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies.restart import attempt_failed

PAUSE_S = 60.0
"""Seconds after its end until a spare is replaced: it may end again and again."""
CHECKED_S = 30.0
"""Seconds in which a spare checks its node. One that fails ends, and the gang must not have ended for it by then."""
NAMED = 8
"""Most workers that a message names."""


def assign(draft: PlanBuilder, missing: Collection[int], *, stay: Collection[str]) -> None:
    """Assign spares to the places without a pod, at the beginning of an attempt; the other places get new pods.

    `stay`: names of pods that continue in their places.
    """
    status = draft.status
    entries = [entry for entry in status.takeovers if entry.pod in stay]
    ready = [spare for spare in draft.observed.spares if _may_take_over(draft, spare)]
    for index, spare in zip(missing, ready, strict=False):
        entries.append(Takeover(worker=index, pod=spare.name))
        message = f"spare {spare.name} on {spare.node} takes the place of worker {index}"
        draft.event(EventType.NORMAL, reasons.SPARE_TOOK_OVER, message)
    without = list(missing)[len(ready) :]
    resized = status.gang_size is not None and draft.resized_in == status.attempt
    follows_failure = status.last_restart_time is not None and not status.released and not resized
    if without and draft.job.spec.policy.spares and follows_failure:
        named = ", ".join(map(str, without[:NAMED])) + (" and others" if len(without) > NAMED else "")
        message = f"no spare is ready for worker {named}, which gets a new pod"
        draft.event(EventType.WARNING, reasons.NO_SPARE, message)
    draft.update(takeovers=tuple(sorted(entries, key=lambda entry: entry.worker)))


def orders(draft: PlanBuilder) -> list[RestartWorker]:
    """Return the orders to spares that have yet to take their places. Their ranks do not run, so they need no time."""
    waiting = {spare.name for spare in draft.observed.spares}
    return [
        RestartWorker(index=entry.worker, attempt=draft.status.attempt, grace_s=0.0, spare=entry.pod)
        for entry in draft.status.takeovers
        if entry.pod in waiting
    ]


def judge_takeovers(draft: PlanBuilder) -> bool:
    """Fail an attempt whose gang is not whole yet if a pod that holds a place by an entry of the status is lost."""
    status = draft.status
    if status.attempt_time is None or status.running_time is not None:
        return False
    sound = {spare.name for spare in draft.observed.spares if not spare.ended and not spare.taken}
    sound |= {worker.name for worker in draft.observed.workers}
    lost = next((entry for entry in status.takeovers if entry.pod not in sound), None)
    if lost is None:
        return False
    failure = Failure(
        time=draft.now,
        attempt=status.attempt,
        worker=lost.worker,
        reason=reasons.WORKER_LOST,
        message=f"pod {lost.pod}, a former spare, vanished before the gang of worker {lost.worker} was complete",
        action=FailureAction.RESTART_IGNORE_MAX,
    )
    attempt_failed(draft, failure)
    return True


def any_waits(draft: PlanBuilder) -> bool:
    """Return True if a spare has checked its node, and could take a place if the next attempt began now."""
    return any(_waits(draft, spare) and has_checked(draft, spare) for spare in draft.observed.spares)


def _may_take_over(draft: PlanBuilder, spare: Worker) -> bool:
    """Return True if a spare may take a place in the current attempt."""
    return spare.attempt < draft.status.attempt and not draft.status.released and _waits(draft, spare)


def _waits(draft: PlanBuilder, spare: Worker) -> bool:
    fits = spare.reusable and spare.attempt >= draft.resized_in
    return fits and _holds_node(draft, spare) and spare.index in _seats(draft)


def has_checked(draft: PlanBuilder, spare: Worker) -> bool:
    """Return True if a spare runs on a node that the job may use, and has had the time to check it."""
    if not _holds_node(draft, spare):
        return False
    at = (spare.started_at or 0.0) + CHECKED_S
    if draft.now < at:
        draft.wake(at)
    return draft.now >= at


def _holds_node(draft: PlanBuilder, spare: Worker) -> bool:
    """Return True if a spare runs on a node that the job may use."""
    return spare.phase is WorkerPhase.RUNNING and not spare.taken and not _on_excluded_node(draft, spare)


def _on_excluded_node(draft: PlanBuilder, spare: Worker) -> bool:
    return any(listed.node == spare.node and listed.until > draft.now for listed in draft.status.excluded_nodes)


def clear(draft: PlanBuilder) -> None:
    """Remove spares that the job has no use for; between two attempts also those of another template.

    Before a gang runs, spares also give their nodes to a worker without one, and all of them if the gang is released.
    """
    status, assigned = draft.status, {entry.pod for entry in draft.status.takeovers}
    between = status.attempt_time is None and status.attempt > 0
    starved = status.running_time is None and (status.released > 0 or any(worker.unplaced for worker in draft.gang))
    for spare in draft.observed.spares:
        outdated = between and spare.phase is WorkerPhase.RUNNING and not spare.reusable
        if outdated or (spare.name not in assigned and (starved or _is_useless(draft, spare))):
            draft.delete(spare, draft.job.spec.policy.failed_grace_s)


def _is_useless(draft: PlanBuilder, spare: Worker) -> bool:
    """Return True if a spare has ended, is beyond the number of spares, or is on a node that is excluded or lost.

    So is one without a node that avoids a node which the job may use again, or that is of another size of the gang.
    """
    if spare.ended:
        at = (spare.finished_at or 0.0) + PAUSE_S
        if draft.now < at:
            draft.wake(at)
        return draft.now >= at
    lost = spare.unreachable_since is not None or spare.deletion is not None
    excluded = {listed.node for listed in draft.status.excluded_nodes}
    outdated = spare.attempt < draft.resized_in or (spare.unplaced and not spare.avoids <= excluded)
    return lost or outdated or _on_excluded_node(draft, spare) or spare.index not in _seats(draft)


def _seats(draft: PlanBuilder) -> range:
    """Return the indices of spares. A gang that lacks workers has one more for each: it grows once they wait."""
    spec = draft.job.spec
    may_have = spec.policy.in_place and not spec.gang
    return range(spec.workers, spec.workers + (spec.policy.spares + spec.absent_workers if may_have else 0))


def replenish(draft: PlanBuilder) -> bool:
    """Create missing spares while the whole gang runs, and report how many wait."""
    if draft.status.running_time is not None:
        taken = {spare.index for spare in draft.observed.spares}
        draft.actions += [
            CreateWorker(index=seat, attempt=draft.status.attempt, spare=True)
            for seat in _seats(draft)
            if seat not in taken
        ]
    _report(draft)
    return False


def _report(draft: PlanBuilder) -> None:
    """Set the condition about spares; an Event says why some cannot start."""
    desired, known = len(_seats(draft)), draft.status.condition(ConditionType.SPARES_READY)
    if not draft.job.spec.policy.spares or not desired:
        draft.clear_condition(ConditionType.SPARES_READY, reasons.NO_SPARE, "the job has no spares")
        return
    waiting = sum(spare.phase is WorkerPhase.RUNNING and not spare.taken for spare in draft.observed.spares)
    problem = first_problem(draft)
    text = f"{waiting} of {desired} {'spare waits' if desired == 1 else 'spares wait'}"
    if waiting >= desired:
        draft.set_condition(ConditionType.SPARES_READY, True, reasons.SPARES_WAIT, text)
    elif problem is None:
        draft.set_condition(ConditionType.SPARES_READY, False, reasons.SPARES_START, text)
    else:
        reason, message = problem
        if known is None or known.status or known.reason != reason:
            draft.event(EventType.WARNING, reason, f"{text}: {message}")
        draft.set_condition(ConditionType.SPARES_READY, False, reason, f"{text}: {message}")


def first_problem(draft: PlanBuilder) -> tuple[str, str] | None:
    """Return reason and message of what keeps a spare from waiting; None if nothing is known."""
    return next(_problems(draft), None)


def _problems(draft: PlanBuilder) -> Iterator[tuple[str, str]]:
    """Yield reason and message of what keeps spares from waiting."""
    refusal = draft.observed.refusal
    if refusal is not None and refusal.attempt == draft.status.attempt and draft.status.running_time is not None:
        yield refusal.reason, refusal.message
    for spare in draft.observed.spares:
        if spare.ended and spare.outcome is not None:
            yield spare.outcome.reason or reasons.WORKER_FAILED, f"{spare.name} has ended: {spare.outcome.message}"
        elif spare.unplaced:
            yield reasons.UNSCHEDULABLE, f"no node fits {spare.name}"
        elif spare.waiting is not None:
            yield spare.waiting.partition(": ")[0], f"{spare.name}: {spare.waiting}"
