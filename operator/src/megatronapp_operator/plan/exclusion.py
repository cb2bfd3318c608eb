"""Machines that a job avoids for a while."""

from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.draft import Draft
from megatronapp_operator.plan.memory import micros
from megatronapp_operator.plan.status import ExcludedNode


def expire(draft: Draft) -> None:
    """Forget machines whose time is over."""
    kept = tuple(one for one in draft.status.excluded_nodes if draft.now < one.until)
    draft.update(excluded_nodes=kept)
    if kept:
        draft.wake(min(one.until for one in kept))


def exclude(draft: Draft, node: str, reason: str) -> None:
    """Avoid a machine from now on. In a full list it takes the place of the oldest."""
    limits = draft.job.spec.policy.exclusion
    entry = ExcludedNode(node=node, reason=reason, until=micros(draft.now + limits.ttl_s))
    others = tuple(one for one in draft.status.excluded_nodes if one.node != node)
    draft.update(excluded_nodes=(*others, entry)[-limits.max_nodes :])
    message = f"{node} gets no worker of this job for {limits.ttl_s:g} s: {reason}"
    draft.event(EventType.WARNING, reasons.NODE_EXCLUDED, message)
