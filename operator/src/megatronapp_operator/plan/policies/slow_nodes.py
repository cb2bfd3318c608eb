"""Nodes that the hub has confirmed to be slow, and what the user chose to do about them."""

from megatronapp_common.job.api.analyzer import SlowRank
from megatronapp_common.job.api.status import (
    ConditionType,
    Failure,
    FailureAction,
    Phase,
)
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import outcome, reasons
from megatronapp_operator.plan.actions import EndAtCheckpoint, EventType
from megatronapp_operator.plan.observed import Worker
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import exclusion, report, spares
from megatronapp_operator.plan.policies.restart import attempt_failed
from megatronapp_operator.plan.spec import SlowNodeAction

CONFIRMED = "confirmed"
NODE_SUBJECTS = frozenset({"rank", "worker", "node"})
"""Subjects with one node; a link has two, and which of them is the cause is not known."""
NODE_CAUSES = frozenset({"compute", "memory", "host"})
"""Causes that stay with a node."""


def slow_nodes(draft: PlanBuilder) -> bool:
    """Apply the slow-node policy of the job to nodes that are confirmed to be slow.

    A full list takes no more of them: restarts for slow nodes count against no budget, so the list bounds them.
    """
    policy, limits = draft.job.spec.slow_node, draft.job.spec.policy.exclusion
    if policy.action is SlowNodeAction.REPORT or not limits.enabled or draft.status.phase is not Phase.RUNNING:
        return False
    found = _nodes(draft)
    free = max(0, limits.max_nodes - len(draft.status.excluded_nodes))
    taken = dict(list(found.items())[:free])
    for node in taken:
        exclusion.exclude(draft, node, reasons.SLOW_NODE_DETECTED)
    waits = _prepare_swap(draft) if policy.action is SlowNodeAction.SWAP_AT_CHECKPOINT else ""
    if waits and taken:
        draft.event(EventType.NORMAL, reasons.SWAP_WAITS, waits)
    _explain(draft, [*_tolerated(draft), *_beyond_limit(draft, list(found)[free:]), *filter(None, [waits])])
    if not taken or policy.action is not SlowNodeAction.EXCLUDE_AND_RESTART:
        return False
    attempt_failed(draft, _failure(draft, taken))
    return True


def _prepare_swap(draft: PlanBuilder) -> str:
    """Let the gang end with its next checkpoint if one of its nodes is excluded as slow, and a spare waits for that.

    Return what the swap waits for, as a sentence; empty if no node is to be left.
    """
    gang, slow = draft.gang, _slow_member(draft)
    if slow is None:
        return ""
    if spares.any_waits(draft):
        if not any(worker.ends_at_checkpoint for worker in gang):
            draft.actions.append(EndAtCheckpoint(index=0, attempt=draft.status.attempt))
        place = f"the place of worker {slow.index}, which leaves {slow.node}"
        return f"The gang ends with its next checkpoint; then a spare takes {place}."
    return f"Worker {slow.index} stays on {slow.node} until a spare waits on another node."


def swap_is_due(draft: PlanBuilder) -> bool:
    """Return True while the gang is to end with its next checkpoint so that a spare replaces a slow node."""
    swaps = draft.job.spec.slow_node.action is SlowNodeAction.SWAP_AT_CHECKPOINT
    return swaps and _slow_member(draft) is not None and spares.any_waits(draft)


def _slow_member(draft: PlanBuilder) -> Worker | None:
    """Return the first worker of the gang whose node is excluded because it is slow."""
    slow = {entry.node for entry in draft.status.excluded_nodes if exclusion.is_slow(entry)}
    return next((worker for worker in draft.gang if worker.node in slow), None)


def swap(draft: PlanBuilder, culprit: Worker) -> Failure | None:
    """Return the failure of an attempt that has ended with a checkpoint so that a spare replaces a slow node.

    None: it has ended for another reason.
    """
    swaps = draft.job.spec.slow_node.action is SlowNodeAction.SWAP_AT_CHECKPOINT
    if not swaps or outcome.outcome_of(culprit).code != ExitCode.PREEMPTED:
        return None
    slow = _slow_member(draft)
    if slow is None or any(worker.taken for worker in draft.gang):
        return None
    return Failure(
        time=draft.now,
        attempt=draft.status.attempt,
        reason=reasons.SLOW_NODE_SWAPPED,
        message=f"a checkpoint is written; worker {slow.index} leaves the slow node {slow.node}",
        action=FailureAction.RESTART_IGNORE_MAX,
        worker=slow.index,
        node=slow.node,
    )


def _nodes(draft: PlanBuilder) -> dict[str, SlowRank]:
    """Return nodes that are slow enough, for long enough, and may be excluded, with the first verdict about each."""
    excluded = {listed.node for listed in (*draft.status.excluded_nodes, *draft.status.tolerated_nodes)}
    excluded |= draft.job.spec.policy.exclusion.allowed
    found: dict[str, SlowRank] = {}
    for verdict in draft.status.slow_ranks:
        node = _node_of(draft, verdict)
        if node is not None and node not in excluded and _bad_enough(draft, verdict):
            found.setdefault(node, verdict)
    return found


def _node_of(draft: PlanBuilder, verdict: SlowRank) -> str | None:
    """Return the node of a verdict about this attempt; in another attempt the same worker may have another node."""
    if verdict.subject not in NODE_SUBJECTS or verdict.since_attempt not in {None, draft.status.attempt}:
        return None
    if verdict.node is not None:
        return verdict.node
    return next((worker.node for worker in draft.gang if worker.index == verdict.worker), None)


def _bad_enough(draft: PlanBuilder, verdict: SlowRank) -> bool:
    policy = draft.job.spec.slow_node
    if verdict.state != CONFIRMED or verdict.cause not in NODE_CAUSES or verdict.since_time is None:
        return False
    if verdict.slowdown is None or verdict.slowdown < policy.min_slowdown:
        return False
    at = verdict.since_time + policy.min_s
    if draft.now < at:
        draft.wake(at)
    return draft.now >= at


def _beyond_limit(draft: PlanBuilder, nodes: list[str]) -> list[str]:
    limit = f"runPolicy.nodeExclusion.maxNodes ({draft.job.spec.policy.exclusion.max_nodes}) is reached"
    return [f"Not excluded, because {limit}: {', '.join(nodes)}."] if nodes else []


def _tolerated(draft: PlanBuilder) -> list[str]:
    tolerated = {listed.node for listed in draft.status.tolerated_nodes}
    named = sorted(tolerated & {_node_of(draft, verdict) for verdict in draft.status.slow_ranks})
    return [f"Not excluded, because the gang found no capacity without: {', '.join(named)}."] if named else []


def _explain(draft: PlanBuilder, notes: list[str]) -> None:
    """Add to the condition why slow nodes stay. The whole message is built again: the hub may be silent for hours."""
    condition = draft.status.condition(ConditionType.SLOW_NODE_DETECTED)
    if condition is not None and condition.status:
        message = " ".join([report.sentences(draft.status.slow_ranks), *notes])
        draft.set_condition(condition.type, True, condition.reason, message)


def _failure(draft: PlanBuilder, nodes: dict[str, SlowRank]) -> Failure:
    """Return the failure that restarts the gang without these nodes; it saves first, because nothing has failed."""
    node, verdict = next(iter(nodes.items()))
    return Failure(
        time=draft.now,
        attempt=draft.status.attempt,
        reason=reasons.SLOW_NODE_EXCLUDED,
        message=f"{', '.join(nodes)} excluded: {verdict.sentence}",
        action=FailureAction.RESTART_IGNORE_MAX,
        worker=verdict.worker,
        node=node,
    )
