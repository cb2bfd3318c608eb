"""Nodes that a job avoids for a while."""

from megatronapp_common.job.api.status import ExcludedNode
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.worker_history import micros

MAX_TOLERATED = 256
"""Most tolerated nodes in a status; the oldest are dropped."""


def expire(draft: PlanBuilder) -> None:
    """Remove nodes from the lists whose time is over, and those that the user allows."""
    allowed, before = draft.job.spec.policy.exclusion.allowed, draft.status.excluded_nodes
    excluded = tuple(entry for entry in before if draft.now < entry.until and entry.node not in allowed)
    tolerated = draft.status.tolerated_nodes
    tolerated = tuple(entry for entry in tolerated if draft.now < entry.until and entry.node not in allowed)
    draft.update(excluded_nodes=excluded, tolerated_nodes=tolerated)
    for entry in before:
        if entry.node in allowed:
            message = f"{entry.node} may get workers of this job again: runPolicy.nodeExclusion.allowedNodes names it"
            draft.event(EventType.NORMAL, reasons.NODE_READMITTED, message)
    if excluded or tolerated:
        draft.wake(min(entry.until for entry in (*excluded, *tolerated)))


def is_slow(excluded: ExcludedNode) -> bool:
    """Return True for a node that works and is only slow."""
    return excluded.reason == reasons.SLOW_NODE_DETECTED


def readmit(draft: PlanBuilder, *, only_slow: bool) -> str | None:
    """Remove one exclusion of a job that has no capacity without that node: a bad node is better than none.

    Return the name of the node, or None if the list is empty. A slow node is preferred, and tolerated from then on:
    otherwise the gang would be restarted for it again and again.
    """
    candidates = [excluded for excluded in draft.status.excluded_nodes if is_slow(excluded) or not only_slow]
    if not candidates:
        return None
    chosen = next(filter(is_slow, candidates), candidates[0])
    draft.update(excluded_nodes=tuple(excluded for excluded in draft.status.excluded_nodes if excluded is not chosen))
    if is_slow(chosen):
        draft.update(tolerated_nodes=(*draft.status.tolerated_nodes, chosen)[-MAX_TOLERATED:])
    message = f"{chosen.node} may get workers of this job again: without it there is no capacity for the gang"
    draft.event(EventType.NORMAL, reasons.NODE_READMITTED, message)
    return chosen.node


def outdated(draft: PlanBuilder) -> list[str]:
    """Return nodes that unplaced workers were created to avoid, but that the job does not exclude any more."""
    excluded = {excluded_node.node for excluded_node in draft.status.excluded_nodes}
    made_without = {node for worker in draft.gang if worker.unplaced for node in worker.avoids}
    return sorted(made_without - excluded)


def exclude(draft: PlanBuilder, node: str, reason: str) -> None:
    """Avoid a node from now on. In a full list it replaces the oldest."""
    limits = draft.job.spec.policy.exclusion
    entry = ExcludedNode(node=node, reason=reason, until=micros(draft.now + limits.ttl_s))
    others = tuple(excluded for excluded in draft.status.excluded_nodes if excluded.node != node)
    tolerated = tuple(excluded for excluded in draft.status.tolerated_nodes if excluded.node != node)
    draft.update(excluded_nodes=(*others, entry)[-limits.max_nodes :], tolerated_nodes=tolerated)
    message = f"{node} gets no worker of this job for {limits.ttl_s:g} s: {reason}"
    draft.event(EventType.WARNING, reasons.NODE_EXCLUDED, message)
