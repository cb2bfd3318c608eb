"""Parts of the status besides the life of the job: replicas, ends, progress, stalls, hub, slow ranks."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable

from megatronapp_common.job.api.analyzer import SlowNodeCost, SlowRank
from megatronapp_common.job.api.progress import Progress
from megatronapp_common.job.api.status import (
    TERMINAL_PHASES,
    ConditionType,
    Phase,
    Replicas,
    Status,
)
from megatronapp_operator.plan import failure_rules, outcome, reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.observed import HubPhase, Observed, WorkerPhase
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.worker_history import first_ends

NAMED_STATES = frozenset({"confirmed", "recovering"})
"""States of verdicts that are reported; a suspect may still turn out to be noise."""

SAME_PROBLEM = {"ErrImagePull": "ImagePullBackOff"}
"""Reasons of a kubelet that alternate while one problem lasts, and the one under which it is reported."""

NAMED = 8
"""Most workers that a message names."""

HANG = "hang"
"""Cause of verdicts about hung ranks: these are stalls, not slowness."""

ON_A_NODE = frozenset({"rank", "worker", "node", "replica", "group"})
"""Subjects that are part of a node if all their ranks are on it. Ranks of a stage or of the whole job are slow for what
they have in common, and a link has two ends."""

DATA_IMBALANCE = "data-imbalance"
"""Cause of verdicts about ranks that get more tokens than others: their node is as fast as the others."""

MAX_SLOW_NODES = 32
"""Most nodes that a status lists."""


def profiles(draft: PlanBuilder) -> None:
    """Report the profiles of the job, or why no attempt begins with them."""
    state = draft.observed.profile
    if state is None or draft.status.phase in TERMINAL_PHASES:
        return
    known = draft.status.condition(ConditionType.PROFILE_APPLIED)
    if known is None or (known.status, known.message) != (state.applied, state.message):
        draft.event(EventType.NORMAL if state.applied else EventType.WARNING, state.reason, state.message)
    draft.set_condition(ConditionType.PROFILE_APPLIED, state.applied, state.reason, state.message)


def volumes(draft: PlanBuilder) -> None:
    """Report what is wrong with the volume claims. The gang starts all the same: all workers may be on one node."""
    problem = draft.observed.volumes
    if problem is None or draft.status.phase in TERMINAL_PHASES:
        return
    if not problem:
        if draft.status.condition(ConditionType.VOLUMES_SHARED) is not None:
            draft.set_condition(ConditionType.VOLUMES_SHARED, True, reasons.VOLUMES_FIT, "all workers can mount them")
        return
    known = draft.status.condition(ConditionType.VOLUMES_SHARED)
    if known is None or known.message != problem:
        draft.event(EventType.WARNING, reasons.VOLUMES_UNFIT, problem)
    draft.set_condition(ConditionType.VOLUMES_SHARED, False, reasons.VOLUMES_UNFIT, problem)


def replicas(draft: PlanBuilder) -> None:
    """Count the workers of the current attempt."""
    found = Counter(worker.phase for worker in draft.gang)
    draft.update(
        generation=draft.job.spec.generation,
        replicas=Replicas(
            desired=draft.job.spec.workers,
            pending=found[WorkerPhase.PENDING],
            running=found[WorkerPhase.RUNNING],
            succeeded=found[WorkerPhase.SUCCEEDED],
            failed=found[WorkerPhase.FAILED],
        ),
    )


def ends(draft: PlanBuilder) -> None:
    """Record how workers of this attempt ended; one whose failure is ignored is listed as succeeded."""
    if draft.status.phase in TERMINAL_PHASES:
        return
    failed = outcome.failed(draft.gang)
    fine = {worker.index for worker in failed if failure_rules.ignored(draft, worker)}
    fine |= {worker.index for worker in draft.gang if worker.phase is WorkerPhase.SUCCEEDED}
    others = tuple(worker for worker in failed if worker.index not in fine)
    draft.update(succeeded=tuple(sorted(fine)), ended=first_ends(others))


def rank_zero(draft: PlanBuilder) -> None:
    """Record which worker holds rank 0: the rank table that says so may vanish with the launchers."""
    found = draft.observed.rank_zero
    if found is not None and draft.job.spec.rank_zero is None and draft.status.phase not in TERMINAL_PHASES:
        draft.update(rank_zero=found)


def removals(draft: PlanBuilder) -> None:
    """Report killed workers that are not removed, and their finalizers: until they are, no others are created."""
    due = {
        worker: worker.deletion.since + draft.job.spec.policy.lost_worker_s
        for worker in draft.observed.pods
        if worker.deletion is not None and worker.deletion.grace_s == 0
    }
    overdue = [worker for worker, at in due.items() if draft.now >= at]
    later = [at for at in due.values() if draft.now < at]
    if later:
        draft.wake(min(later))
    if not overdue:
        draft.clear_condition(ConditionType.REMOVAL_BLOCKED, reasons.WORKERS_GONE, "all killed workers are removed")
        return
    names = ", ".join(str(worker.index) for worker in overdue[:NAMED]) + (" and others" if len(overdue) > NAMED else "")
    finalizers = ", ".join(sorted({name for worker in overdue for name in worker.finalizers}))
    why = f"finalizers keep it: {finalizers}" if finalizers else "the cluster does not say why"
    limit = draft.job.spec.policy.lost_worker_s
    message = f"worker {names} still exists {limit:g} s after it was killed; {why}"
    if not draft.status.is_true(ConditionType.REMOVAL_BLOCKED):
        draft.event(EventType.WARNING, reasons.WORKERS_HELD, message)
    draft.set_condition(ConditionType.REMOVAL_BLOCKED, True, reasons.WORKERS_HELD, message)


def progress(draft: PlanBuilder) -> None:
    """Store newer progress, with the time of its last change by our clock."""
    new, old = draft.observed.progress, draft.status.progress
    if new is None or (old is not None and _before(new, old)) or new.attempt > draft.status.attempt:
        return
    if old is None or _mark(new) != _mark(old):
        draft.update(progress_time=draft.now)
    reported_at = None if new.updated_at is None else float(int(new.updated_at))  # as it is written down
    iteration, taken_at = _checkpoint(draft, new)
    draft.update(
        progress=dataclasses.replace(
            new, updated_at=reported_at, checkpoint_iteration=iteration, checkpoint_time=taken_at
        )
    )


def _checkpoint(draft: PlanBuilder, new: Progress) -> tuple[int | None, float | None]:
    """Return step and time of the newest checkpoint: it was taken when it was first seen or before, by our clock.

    A hub of an earlier release than its ranks reports no time, and a launcher may report it meanwhile: the last
    checkpoint of the attempt with a known time counts.
    """
    old = draft.status.progress
    known = None if old is None or old.attempt != new.attempt else old
    if new.checkpoint_time is None:
        if known is not None and known.checkpoint_time is not None:
            return known.checkpoint_iteration, known.checkpoint_time
        return new.checkpoint_iteration, None
    first_seen = float(int(draft.now))
    if (
        known is not None
        and known.checkpoint_time is not None
        and known.checkpoint_iteration == new.checkpoint_iteration
    ):
        first_seen = known.checkpoint_time
    return new.checkpoint_iteration, min(new.checkpoint_time, first_seen)


def stalls(draft: PlanBuilder) -> None:
    """Report ranks that the hub found hung; only the progress deadline restarts the gang.

    Without a report of the hub nothing is cleared, and the last report about a job stays after its end.
    """
    if draft.observed.hung_ranks is not None and draft.status.phase not in TERMINAL_PHASES:
        draft.update(hung_ranks=draft.observed.hung_ranks)
    if draft.status.phase in TERMINAL_PHASES | {Phase.SUSPENDED}:
        return
    if draft.status.running_time is None:
        if all(worker.attempt == draft.status.attempt for worker in draft.observed.workers):
            draft.clear_condition(ConditionType.STALLED, reasons.WORKERS_GONE, "the workers that stalled were removed")
        return
    ranks = draft.status.hung_ranks
    known = draft.status.condition(ConditionType.STALLED)
    if not ranks:
        if known is None or known.reason != reasons.PROGRESS_UNKNOWN or _reachable_since(draft, known.since):
            draft.clear_condition(ConditionType.STALLED, reasons.PROGRESSING, "all ranks make progress")
        return
    message = f"no progress of rank {', '.join(map(str, ranks))}"
    if known is None or not known.status or known.reason != reasons.RANK_HUNG:
        draft.event(EventType.WARNING, reasons.RANK_HUNG, message)
    draft.set_condition(ConditionType.STALLED, True, reasons.RANK_HUNG, message)


def shared_memory(draft: PlanBuilder) -> None:
    """Report full shared memory. Training continues without the rings and documents that do not fit."""
    full = draft.observed.full_shared_memory
    if full is None or draft.status.phase in TERMINAL_PHASES:
        return
    if not full:
        message = "shared memory has free space again"
        draft.clear_condition(ConditionType.SHARED_MEMORY_FULL, reasons.SHARED_MEMORY_FREE, message)
        return
    hint = "traces or progress may be missing and data loaders may fail; raise spec.shm.sizeLimit or free some space"
    message = f"{'; '.join(full)}: {hint}"
    if not draft.status.is_true(ConditionType.SHARED_MEMORY_FULL):
        draft.event(EventType.WARNING, reasons.SHARED_MEMORY_FULL, message)
    draft.set_condition(ConditionType.SHARED_MEMORY_FULL, True, reasons.SHARED_MEMORY_FULL, message)


def _reachable_since(draft: PlanBuilder, since: float) -> bool:
    """Return True if hub or launcher answered after a condition changed, whose time has whole seconds."""
    return draft.observed.last_contact is None or draft.observed.last_contact >= since + 1.0


def hub(draft: PlanBuilder) -> None:
    """Report why the hub does not start, once for each reason. Training needs no hub and continues."""
    found, known = draft.observed.hub, draft.status.condition(ConditionType.HUB_READY)
    if found is None or draft.status.phase in TERMINAL_PHASES:
        return
    if found.phase is HubPhase.READY:
        if known is not None and not known.status:
            draft.set_condition(ConditionType.HUB_READY, True, reasons.HUB_RUNS, "the hub runs")
            draft.event(EventType.NORMAL, reasons.HUB_RUNS, "the hub runs")
        return
    if found.waiting is None:
        return
    cause = found.waiting.partition(":")[0]
    reason = SAME_PROBLEM.get(cause, cause)
    message = f"the hub does not start, and training continues without it: {found.waiting}"
    if known is None or known.status or known.reason != reason:
        draft.event(EventType.WARNING, reasons.HUB_NOT_RUNNING, message)
        draft.set_condition(ConditionType.HUB_READY, False, reason, message)


def tokens(draft: PlanBuilder) -> None:
    """Report that hub and launcher cannot be read without their key; they work well until the next attempt."""
    known = draft.status.condition(ConditionType.TOKEN_ACCEPTED)
    if draft.status.phase in TERMINAL_PHASES:
        return
    if not draft.observed.locked:
        if known is not None and not known.status and _reachable_since(draft, known.since):
            message = "hub and launcher accept the operator's token"
            draft.set_condition(ConditionType.TOKEN_ACCEPTED, True, reasons.TOKEN_ACCEPTED, message)
        return
    reason, cause = _lock(draft.observed)
    message = (
        f"{cause}; progress and verdicts cannot be read, and training continues; add the key that the job was started "
        "with after the new one in the chart's key Secret, or wait until the next attempt of the job takes the new key"
    )
    if known is None or known.status or known.reason != reason:
        draft.event(EventType.WARNING, reason, message)
    draft.set_condition(ConditionType.TOKEN_ACCEPTED, False, reason, message)


def _lock(observed: Observed) -> tuple[str, str]:
    """Return reason and cause for a hub and a launcher that cannot be read."""
    if observed.unknown_key is not None:
        cause = f"the job was started with the installation key {observed.unknown_key}, which is not in the key file"
        return reasons.KEY_UNKNOWN, cause
    verb = "refuses" if len(observed.token_refused) == 1 else "refuse"
    names = " and the ".join(observed.token_refused)
    cause = f"the {names} {verb} the operator's token: the job was started with another installation key"
    return reasons.TOKEN_REFUSED, cause


def slow_ranks(draft: PlanBuilder) -> None:
    """Store the hub's verdicts, and report which are new or cleared."""
    found = draft.observed.slow_ranks
    if found is None or draft.status.phase in TERMINAL_PHASES:
        return
    before, named = _named(draft.status.slow_ranks), _named(found)
    label = _subject_label(named[0]) if named else None
    draft.update(slow_ranks=found, slow_nodes=costs_by_node(found), slow_node=label)
    _report_verdicts(draft, before, named)
    if not named:
        draft.clear_condition(ConditionType.SLOW_NODE_DETECTED, reasons.NONE_SLOW, "no rank, link or node is slow now")
        return
    draft.set_condition(ConditionType.SLOW_NODE_DETECTED, True, named[0].cause.capitalize(), sentences(found))


def sentences(verdicts: tuple[SlowRank, ...]) -> str:
    """Return the sentences of the verdicts without those about hung ranks, as message of the condition."""
    return " ".join(verdict.sentence for verdict in _named(verdicts))


def _named(verdicts: tuple[SlowRank, ...]) -> tuple[SlowRank, ...]:
    return tuple(verdict for verdict in verdicts if verdict.state in NAMED_STATES and verdict.cause != HANG)


def seconds_per_step(status: Status) -> float:
    """Return what the costliest verdict costs each step: verdicts may blame the same time."""
    return max((verdict.seconds_per_step or 0.0 for verdict in _named(status.slow_ranks)), default=0.0)


def costs_by_node(verdicts: Iterable[SlowRank]) -> tuple[SlowNodeCost, ...]:
    """Return the nodes that verdicts name, costliest first, each with what all its verdicts cost.

    Costs are added, also those of the same ranks: the hub divides the time that several verdicts cost together between
    them, and a verdict is about one node at most.
    """
    found: dict[str, list[SlowRank]] = {}
    for verdict in _named(tuple(verdicts)):
        if verdict.node and verdict.subject in ON_A_NODE and verdict.cause != DATA_IMBALANCE:
            found.setdefault(verdict.node, []).append(verdict)
    costs = [_node_cost(node, about) for node, about in found.items()]
    return tuple(sorted(costs, key=lambda cost: (-(cost.gpu_hours or 0.0), cost.node))[:MAX_SLOW_NODES])


def _node_cost(node: str, verdicts: list[SlowRank]) -> SlowNodeCost:
    return SlowNodeCost(
        node=node,
        ranks=tuple(sorted({rank for verdict in verdicts for rank in verdict.ranks})),
        causes=tuple(sorted({verdict.cause for verdict in verdicts})),
        since=min((verdict.since_time for verdict in verdicts if verdict.since_time is not None), default=None),
        gpu_hours=_sum_of_known(verdict.gpu_hours for verdict in verdicts),
        cost=_sum_of_known(verdict.cost for verdict in verdicts),
    )


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    """Return the sum in three digits, as the hub reports parts; None if none is known, or JSON cannot hold it."""
    known = [value for value in values if value is not None]
    total = float(f"{sum(known):.3g}")
    return total if known and math.isfinite(total) else None


def _subject_label(verdict: SlowRank) -> str:
    """Return the subject for a column of a table."""
    if verdict.node is not None:
        return verdict.node
    if verdict.subject == "worker" and verdict.worker is not None:
        return f"worker {verdict.worker}"
    if verdict.subject == "link":
        return f"link {'-'.join(map(str, verdict.ranks))}"
    return f"rank {verdict.ranks[0]}" if verdict.ranks else verdict.subject


def _report_verdicts(draft: PlanBuilder, before: tuple[SlowRank, ...], now: tuple[SlowRank, ...]) -> None:
    """Add an Event for each new verdict, and one for each that is not in the list any more."""
    for verdict in _without(now, before):
        draft.event(EventType.WARNING, reasons.SLOW_NODE_DETECTED, verdict.sentence)
    for verdict in _without(before, now):
        draft.event(EventType.NORMAL, reasons.SLOW_NODE_CLEARED, f"no longer: {verdict.sentence}")


def _without(verdicts: tuple[SlowRank, ...], others: tuple[SlowRank, ...]) -> tuple[SlowRank, ...]:
    ids = {verdict.id for verdict in others}
    return tuple(verdict for verdict in verdicts if verdict.id not in ids)


def _before(new: Progress, old: Progress) -> bool:
    """Return True if progress is older than what is known, as from a hub whose agent has died.

    Time alone decides only if the iteration is not higher: the clock of a node may be set back.
    """
    if new.attempt != old.attempt or new.updated_at is None or old.updated_at is None:
        return new.attempt < old.attempt
    return new.iteration <= old.iteration and new.updated_at < old.updated_at


def _mark(page: Progress) -> tuple[int, int, str]:
    """Return what changes while a job is alive; an evaluation or a checkpoint is a sign of life, too."""
    return page.attempt, page.iteration, page.state
