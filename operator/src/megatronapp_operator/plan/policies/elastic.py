"""Size of the gang: fewer model replicas while nodes are missing, and more again at a checkpoint.

A gang that finds no node for some of its workers after a failure continues with as many replicas as its placed workers
hold. Which capacity the cluster has is known by trying only: the quota, other jobs, taints and affinities all decide.
So a smaller gang has a spare for each absent worker. Once enough of these hold nodes, the gang ends with its next
checkpoint, and the next attempt is larger. Any other restart meanwhile has the larger size, too.

A worker knows the number of workers, so no pod continues in an attempt of another size.
"""

from megatronapp_common.job.api.progress import GangSize
from megatronapp_common.job.api.status import TERMINAL_PHASES, ConditionType, Failure, FailureAction, Phase
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import outcome, reasons
from megatronapp_operator.plan.actions import EndAtCheckpoint, EventType
from megatronapp_operator.plan.observed import PodRejection, Worker
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import exclusion, slow_nodes, spares
from megatronapp_operator.plan.policies.restart import next_attempt, paused_until
from megatronapp_operator.plan.spec import ElasticSize

NAMED = 4
"""Most nodes that a message names."""


def shrink(draft: PlanBuilder) -> bool:
    """Begin the next attempt if workers have had no node for too long, with as many replicas as there are nodes for.

    Slow nodes that the job avoids are among these, and are given back for that: they cost less than a replica. Whether
    they are free is known by trying only; if they are not, the attempt that tries them gets smaller after its patience.
    The first gang of a job waits for its full size.
    """
    elastic, status, limit = draft.job.spec.elastic, draft.status, draft.job.spec.policy.start_deadline_s
    if elastic is None or status.attempt_time is None or status.running_time is not None:
        return False
    if status.unplaced_time is None or not _has_begun(draft):
        return False
    placed = sum(worker.scheduled and worker.live and not worker.taken for worker in draft.gang)
    found = _fitting(draft, placed)
    if found is None:
        return False
    due = status.unplaced_time + elastic.patience_s
    begun = status.attempt_time if status.scheduled_time is None else status.scheduled_time
    due = due if limit is None else min(due, begun + limit)  # at which all would give back their nodes
    if draft.now < due:
        draft.wake(due)
        return False
    missing, seconds = draft.job.spec.workers - placed, draft.now - status.unplaced_time
    why = f"{missing} of {draft.job.spec.workers_text} had no node for {seconds:.0f} s"
    for _ in range(found.workers - placed):
        exclusion.readmit(draft, only_slow=True)
    if found.workers < draft.job.spec.workers:
        _shrink(draft, found, why)
    else:
        next_attempt(draft)
        draft.set_condition(ConditionType.PODS_SCHEDULED, False, reasons.NODE_READMITTED, why)
    return True


def _fitting(draft: PlanBuilder, placed: int) -> ElasticSize | None:
    """Return the largest size, no larger than now, for which placed workers and avoided slow nodes suffice.

    None: no size is allowed for so few, or there is only one, and the gang waits as any other does.
    """
    sizes, most = _allowed(draft), draft.job.spec.workers
    if len(sizes) < 2:
        return None
    nodes = placed + sum(map(exclusion.is_slow, draft.status.excluded_nodes))
    return next((size for size in sizes if size.workers <= min(nodes, most)), None)


def shrink_to_quota(draft: PlanBuilder, refusal: PodRejection) -> bool:
    """Begin an attempt of the next smaller size if a quota has refused the pods of this one for too long.

    How many pods the quota allows is not known, so a smaller size is tried at a time. A quota takes a moment to notice
    that pods were deleted: the first refusal of each size releases the gang, and its next attempt asks again.
    """
    elastic, status = draft.job.spec.elastic, draft.status
    since = status.start_time if status.last_restart_time is None else paused_until(draft)
    if elastic is None or refusal.final or refusal.denied or since is None or not _has_begun(draft):
        return False
    if not status.released:
        return False
    smaller = next(iter(_smaller(draft)), None)
    if smaller is None or draft.now < since + elastic.patience_s:
        return False
    _shrink(draft, smaller, refusal.message)
    draft.update(released=0)
    return True


def order_end(draft: PlanBuilder) -> bool:
    """Let a smaller gang end with its next checkpoint once spares hold the nodes of a larger one.

    If a spare is lost before that checkpoint, the gang continues: the order is withdrawn, unless a slow node needs it.
    """
    if draft.status.phase is not Phase.RUNNING:
        return False
    grows, ordered = _larger(draft) is not None, any(worker.ends_at_checkpoint for worker in draft.gang)
    action = EndAtCheckpoint(index=0, attempt=draft.status.attempt, withdrawn=not grows)
    if grows != ordered and action not in draft.actions and (grows or not slow_nodes.swap_is_due(draft)):
        draft.actions.append(action)
    return False


def ended_to_grow(draft: PlanBuilder, culprit: Worker) -> Failure | None:
    """Return the failure of an attempt that has ended with a checkpoint in order to grow; None: for another reason."""
    if not draft.job.spec.absent_workers or outcome.outcome_of(culprit).code != ExitCode.PREEMPTED:
        return None
    if not _ends(draft) or any(worker.taken for worker in draft.gang):
        return None
    return Failure(
        time=draft.now,
        attempt=draft.status.attempt,
        reason=reasons.DATA_PARALLEL_GROWS,
        message="a checkpoint is written, so that the gang can grow",
        action=FailureAction.RESTART_IGNORE_MAX,
    )


def grow(draft: PlanBuilder) -> bool:
    """Begin the next attempt with more replicas if spares hold the nodes that it has more than the one before."""
    status, elastic = draft.status, draft.job.spec.elastic
    if status.attempt_time is not None or status.gang_size is None or elastic is None:
        return False
    before = elastic.current(status)
    if before not in _allowed(draft):
        _grow(draft, elastic.full, f"runPolicy.elastic does not allow {before.data} any more")
        return True
    larger = _larger(draft) if draft.resized_in < status.attempt else None
    if larger is None:
        return False
    _grow(draft, larger, f"spares hold nodes for more than the {before.data} before")
    return True


def _grow(draft: PlanBuilder, size: ElasticSize, why: str) -> None:
    attempt = draft.status.attempt
    draft.update(gang_size=GangSize(data=size.data, since_attempt=attempt))
    message = f"attempt {attempt} has {_replicas(size)}; {why}"
    draft.event(EventType.NORMAL, reasons.DATA_PARALLEL_GROWN, message)


def report(draft: PlanBuilder) -> None:
    """Set the condition about the size; an Event says that the gang grows at its next checkpoint."""
    spec, status = draft.job.spec, draft.status
    if (
        spec.elastic is None
        or status.gang_size is None
        or status.phase in TERMINAL_PHASES | {Phase.SUSPENDED}
        or draft.job.deletion_requested
    ):
        return
    current, full = spec.elastic.current(status), spec.elastic.full
    if current == full:
        message = f"the gang has all {full.data} model replicas"
        draft.clear_condition(ConditionType.DATA_PARALLEL_REDUCED, reasons.FULL_SIZE, message)
        return
    known = status.condition(ConditionType.DATA_PARALLEL_REDUCED)
    absent, waiting = full.workers - current.workers, len(_waiting(draft))
    workers = "absent worker" if absent == 1 else "absent workers"
    text = f"{current.data} of {full.data} model replicas; spares hold nodes for {waiting} of {absent} {workers}"
    larger = _larger(draft)
    if larger is not None and status.phase is Phase.RUNNING:
        text += f"; the gang grows to {larger.data} replicas after its next checkpoint"
        if known is None or known.reason != reasons.GROWS_AT_CHECKPOINT:
            draft.event(EventType.NORMAL, reasons.GROWS_AT_CHECKPOINT, text)
        draft.set_condition(ConditionType.DATA_PARALLEL_REDUCED, True, reasons.GROWS_AT_CHECKPOINT, text)
        return
    if known is not None and known.reason == reasons.GROWS_AT_CHECKPOINT and status.phase is Phase.RUNNING:
        message = f"{text}; the gang trains on, as it cannot grow any more"
        draft.event(EventType.NORMAL, reasons.GROWTH_WITHDRAWN, message)
    problem = spares.first_problem(draft) if status.running_time is not None else None
    text += "" if problem is None else f"; {problem[1]}"
    for node in draft.observed.leaving_nodes[:NAMED]:
        text += f"; node {node.name} {node.reason} and does not count"
    draft.set_condition(ConditionType.DATA_PARALLEL_REDUCED, True, reasons.NODES_MISSING, text)


def _shrink(draft: PlanBuilder, size: ElasticSize, why: str) -> None:
    """Begin the next attempt with fewer replicas."""
    assert draft.job.spec.elastic is not None
    before = draft.job.spec.elastic.current(draft.status).data
    next_attempt(draft)
    draft.update(gang_size=GangSize(data=size.data, since_attempt=draft.status.attempt))
    message = f"{why}; attempt {draft.status.attempt} continues with {_replicas(size)}, {before} before"
    draft.event(EventType.WARNING, reasons.DATA_PARALLEL_REDUCED, message)


def _replicas(size: ElasticSize) -> str:
    return "1 model replica" if size.data == 1 else f"{size.data} model replicas"


def _has_begun(draft: PlanBuilder) -> bool:
    """Return True if a gang of the full size has trained, or has failed: the first one waits for its nodes."""
    return bool(draft.status.restarts) or draft.status.condition(ConditionType.RUNNING) is not None


def _allowed(draft: PlanBuilder) -> tuple[ElasticSize, ...]:
    """Return the sizes that the gang may have, largest first. Without restarts in place no spare would wait to grow."""
    spec = draft.job.spec
    if spec.elastic is None:
        return ()
    return (spec.elastic.full, *(spec.elastic.smaller if spec.policy.in_place and not spec.gang else ()))


def _smaller(draft: PlanBuilder) -> list[ElasticSize]:
    """Return the sizes below the current one, largest first."""
    return [size for size in _allowed(draft) if size.workers < draft.job.spec.workers]


def _larger(draft: PlanBuilder) -> ElasticSize | None:
    """Return the largest size for which workers and waiting spares hold nodes that can be used again; None: no larger
    one than now.
    """
    workers = draft.job.spec.workers
    sound = sum(worker.scheduled and _keeps_node(draft, worker) for worker in draft.observed.workers)
    nodes = min(sound, workers) + len(_waiting(draft))
    return next((size for size in _allowed(draft) if workers < size.workers <= nodes), None)


def _waiting(draft: PlanBuilder) -> list[Worker]:
    """Return the spares that hold nodes of a larger gang; no spare of an earlier size is one of them.

    Nor is one on a node that is to be emptied, which would take no pod of the larger gang.
    """
    return [
        spare
        for spare in draft.observed.spares
        if spare.attempt >= draft.resized_in and not _leaves(draft, spare) and spares.has_checked(draft, spare)
    ]


def _keeps_node(draft: PlanBuilder, worker: Worker) -> bool:
    """Return True if the next attempt may have a worker on the node of this one, which is not to be emptied."""
    excluded = any(listed.node == worker.node and listed.until > draft.now for listed in draft.status.excluded_nodes)
    return not worker.taken and not excluded and not _leaves(draft, worker)


def _leaves(draft: PlanBuilder, worker: Worker) -> bool:
    """Return True if the node of a worker or spare is to be emptied."""
    return any(node.name == worker.node for node in draft.observed.leaving_nodes)


def _ends(draft: PlanBuilder) -> bool:
    """Return True if the gang has the order to end with its next checkpoint, or had it: a withdrawal can be late."""
    return any(worker.ends_at_checkpoint or worker.end_withdrawn for worker in draft.gang)
