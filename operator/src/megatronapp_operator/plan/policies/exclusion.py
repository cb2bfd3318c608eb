"""Nodes that a job avoids for a while."""

from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.status import ExcludedNode
from megatronapp_operator.plan.worker_history import micros

MAX_TOLERATED = 256
"""Most tolerated nodes in a status; the oldest are dropped."""


def expire(draft: PlanBuilder) -> None:
    """Remove nodes from the lists whose time is over, and those that the user allows."""
    allowed, before = draft.job.spec.policy.exclusion.allowed, draft.status.excluded_nodes
    kept = tuple(one for one in before if draft.now < one.until and one.node not in allowed)
    tolerated = tuple(one for one in draft.status.tolerated_nodes if draft.now < one.until and one.node not in allowed)
    draft.update(excluded_nodes=kept, tolerated_nodes=tolerated)
    for one in before:
        if one.node in allowed:
            message = f"{one.node} may get workers of this job again: runPolicy.nodeExclusion.allowedNodes names it"
            draft.event(EventType.NORMAL, reasons.NODE_READMITTED, message)
    if kept or tolerated:
        draft.wake(min(one.until for one in (*kept, *tolerated)))


def is_slow(one: ExcludedNode) -> bool:
    """Return True for a node that works and is only slow."""
    return one.reason == reasons.SLOW_NODE_DETECTED


def readmit(draft: PlanBuilder, *, only_slow: bool) -> str | None:
    """Remove one exclusion of a job that has no capacity without that node: a bad node is better than none.

    Return the name of the node, or None if the list is empty. A slow node is preferred, and tolerated from then on:
    otherwise the gang would be restarted for it again and again.
    """
    candidates = [one for one in draft.status.excluded_nodes if is_slow(one) or not only_slow]
    if not candidates:
        return None
    chosen = next(filter(is_slow, candidates), candidates[0])
    draft.update(excluded_nodes=tuple(one for one in draft.status.excluded_nodes if one is not chosen))
    if is_slow(chosen):
        draft.update(tolerated_nodes=(*draft.status.tolerated_nodes, chosen)[-MAX_TOLERATED:])
    message = f"{chosen.node} may get workers of this job again: without it there is no capacity for the gang"
    draft.event(EventType.NORMAL, reasons.NODE_READMITTED, message)
    return chosen.node


def outdated(draft: PlanBuilder) -> list[str]:
    """Return nodes that unplaced workers were created to avoid, but that the job does not exclude any more."""
    excluded = {one.node for one in draft.status.excluded_nodes}
    made_without = {node for one in draft.gang if one.unplaced for node in one.avoids}
    return sorted(made_without - excluded)


def exclude(draft: PlanBuilder, node: str, reason: str) -> None:
    """Avoid a node from now on. In a full list it replaces the oldest."""
    limits = draft.job.spec.policy.exclusion
    entry = ExcludedNode(node=node, reason=reason, until=micros(draft.now + limits.ttl_s))
    others = tuple(one for one in draft.status.excluded_nodes if one.node != node)
    tolerated = tuple(one for one in draft.status.tolerated_nodes if one.node != node)
    draft.update(excluded_nodes=(*others, entry)[-limits.max_nodes :], tolerated_nodes=tolerated)
    message = f"{node} gets no worker of this job for {limits.ttl_s:g} s: {reason}"
    draft.event(EventType.WARNING, reasons.NODE_EXCLUDED, message)
