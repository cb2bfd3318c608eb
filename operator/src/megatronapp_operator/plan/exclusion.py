"""Machines that a job avoids for a while."""

from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.draft import Draft
from megatronapp_operator.plan.memory import micros
from megatronapp_operator.plan.spec import SlowNodeAction
from megatronapp_operator.plan.status import ExcludedNode


def expire(draft: Draft) -> None:
    """Forget machines whose time is over."""
    kept = tuple(one for one in draft.status.excluded_nodes if draft.now < one.until)
    draft.update(excluded_nodes=kept)
    if kept:
        draft.wake(min(one.until for one in kept))


def readmit(draft: Draft) -> None:
    """Take back the oldest exclusion of a job that finds no room without that machine: a bad one is better than none.

    Not that of a slow machine where the gang would be restarted for it at once, again and again.
    """
    keeps_slow = draft.job.spec.slow_node.action is SlowNodeAction.EXCLUDE_AND_RESTART
    for one in draft.status.excluded_nodes:
        if one.reason == reasons.SLOW_NODE_DETECTED and keeps_slow:
            continue
        draft.update(excluded_nodes=tuple(other for other in draft.status.excluded_nodes if other is not one))
        message = f"{one.node} may get workers of this job again: without it there is no room for the gang"
        draft.event(EventType.NORMAL, reasons.NODE_READMITTED, message)
        return


def exclude(draft: Draft, node: str, reason: str) -> None:
    """Avoid a machine from now on. In a full list it takes the place of the oldest."""
    limits = draft.job.spec.policy.exclusion
    entry = ExcludedNode(node=node, reason=reason, until=micros(draft.now + limits.ttl_s))
    others = tuple(one for one in draft.status.excluded_nodes if one.node != node)
    draft.update(excluded_nodes=(*others, entry)[-limits.max_nodes :])
    message = f"{node} gets no worker of this job for {limits.ttl_s:g} s: {reason}"
    draft.event(EventType.WARNING, reasons.NODE_EXCLUDED, message)
