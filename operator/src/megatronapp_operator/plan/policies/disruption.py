"""Protection of a gang from voluntary evictions: those of drains and autoscalers, which a budget refuses.

One lost worker restarts the whole gang, so a budget allows either no eviction or any. The condition is the memory: a
job without it has never had a budget, and costs no request.

With `CheckpointFirst` the budget exists while an eviction would lose much. If a node of the gang is to be emptied then,
a checkpoint is requested from its ranks; once that is reported, the budget is removed and evictions pass.
"""

from collections.abc import Sequence

from megatronapp_common.job.api.status import TERMINAL_PHASES, ConditionType, Phase
from megatronapp_common.save_request import SaveRequest
from megatronapp_common.text.times import rfc3339
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import (
    EnsureDisruptionBudget,
    EventType,
    RemoveDisruptionBudget,
    RequestCheckpoint,
)
from megatronapp_operator.plan.observed import LeavingNode, Worker
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.spec import Disruption

RETRY_S = 600.0
"""Seconds until a budget that was refused is tried again. The rights may change while a job runs."""
UNANSWERED_S = 300.0
"""Seconds after which a checkpoint is requested again if none was reported since."""
REPEAT_S = 3600.0
"""Seconds after which a checkpoint is requested again for the same nodes: they may stay cordoned for days, and nothing
was evicted from them while the one before was young."""
NAMED = 4
"""Most nodes that a message or a request names."""


def guard(draft: PlanBuilder) -> None:
    """Set or remove the budget of the job, and report it. It follows all other decisions of a pass."""
    if draft.job.deletion_requested:
        return  # the garbage collector removes it
    refuses, refusal = _refuses(draft), draft.observed.budget_refusal
    leaving = _leaving(draft) if refuses else ()
    if refuses and refusal:
        _report_refusal(draft, refusal)
        draft.wake(draft.now + RETRY_S)
        return
    if refuses and _was_refused(draft):
        draft.actions.append(EnsureDisruptionBudget())  # the condition changes once it has succeeded
        return
    _report(draft, leaving, refuses=refuses)
    has_had = draft.status.condition(ConditionType.EVICTIONS_REFUSED) is not None
    if has_had and draft.observed.disruption_budget is not refuses:
        draft.actions.append(EnsureDisruptionBudget() if refuses else RemoveDisruptionBudget())
    if leaving and draft.job.spec.policy.disruption is Disruption.CHECKPOINT_FIRST:
        _request(draft, leaving)


def saved_at(draft: PlanBuilder) -> float | None:
    """Return the time after which steps of this attempt are in no checkpoint; None before the whole gang runs."""
    status, progress = draft.status, draft.status.current_progress
    if status.running_time is None:
        return None
    taken = None if progress is None else progress.checkpoint_time
    return status.running_time if taken is None else max(status.running_time, taken)


def _refuses(draft: PlanBuilder) -> bool:
    """Return True if no worker may be evicted now."""
    policy = draft.job.spec.policy
    if policy.disruption is Disruption.ALLOW or not _has_gang(draft):
        return False
    if policy.disruption is Disruption.PROTECT:
        return True
    since = saved_at(draft)
    if since is None:
        return False
    until = since + policy.checkpoint_age_s
    if draft.now < until:
        draft.wake(until)
    return draft.now >= until


def _has_gang(draft: PlanBuilder) -> bool:
    """Return True from the creation of a gang until its attempt or the job is over, and it can lose nothing."""
    status = draft.status
    rests = status.phase in TERMINAL_PHASES | {Phase.SUSPENDED} or status.is_true(ConditionType.FAILURE_TARGET)
    return status.attempt_time is not None and not rests


def _leaving(draft: PlanBuilder) -> tuple[LeavingNode, ...]:
    """Return the nodes of the gang that are to be emptied, in the order of its workers."""
    known = {node.name: node for node in draft.observed.leaving_nodes}
    names = dict.fromkeys(worker.node for worker in draft.gang if worker.live and worker.node is not None)
    return tuple(known[name] for name in names if name in known)


def _was_refused(draft: PlanBuilder) -> bool:
    """Return True if the last budget was refused, and none is known to exist since."""
    known = draft.status.condition(ConditionType.EVICTIONS_REFUSED)
    return known is not None and known.reason == reasons.BUDGET_REFUSED and not draft.observed.disruption_budget


def _report_refusal(draft: PlanBuilder, refusal: str) -> None:
    """Report why no budget could be set, once as an Event."""
    known = draft.status.condition(ConditionType.EVICTIONS_REFUSED)
    message = f"evictions are not refused: {refusal}"
    if known is None or known.reason != reasons.BUDGET_REFUSED:
        draft.event(EventType.WARNING, reasons.BUDGET_REFUSED, message)
    draft.set_condition(ConditionType.EVICTIONS_REFUSED, False, reasons.BUDGET_REFUSED, message)


def _report(draft: PlanBuilder, leaving: Sequence[LeavingNode], *, refuses: bool) -> None:
    """Set the condition; Events say that an eviction waits, and that it no longer has to."""
    known = draft.status.condition(ConditionType.EVICTIONS_REFUSED)
    if known is None and not refuses:
        return
    reason, message = _refused_text(draft, leaving) if refuses else _allowed_text(draft)
    waited = known is not None and known.status and known.reason == reasons.EVICTION_WAITS
    waits = reason == reasons.EVICTION_WAITS
    if waits != waited and (waits or not refuses):
        draft.event(EventType.NORMAL, reason, message)
    draft.set_condition(ConditionType.EVICTIONS_REFUSED, refuses, reason, message)


def _refused_text(draft: PlanBuilder, leaving: Sequence[LeavingNode]) -> tuple[str, str]:
    """Return reason and message while evictions are refused."""
    nodes = ", ".join(f"node {node.name} {node.reason}" for node in leaving[:NAMED])
    if draft.job.spec.policy.disruption is Disruption.PROTECT:
        return reasons.PROTECTED, "runPolicy.disruption is Protect: no worker may be evicted"
    if nodes:
        text = f"{nodes}: an eviction waits for a checkpoint; {_newest(draft)}{_postponed(draft, leaving)}"
        return reasons.EVICTION_WAITS, text
    return reasons.CHECKPOINT_OLD, f"no worker may be evicted before the next checkpoint; {_newest(draft)}"


def _allowed_text(draft: PlanBuilder) -> tuple[str, str]:
    """Return reason and message while evictions are allowed."""
    since, policy = saved_at(draft), draft.job.spec.policy
    if policy.disruption is Disruption.CHECKPOINT_FIRST and _has_gang(draft) and since is not None:
        until = rfc3339(since + policy.checkpoint_age_s)
        return reasons.CHECKPOINT_YOUNG, f"workers may be evicted until {until}; {_newest(draft)}"
    return reasons.EVICTIONS_ALLOWED, "no gang is protected from evictions"


def _newest(draft: PlanBuilder) -> str:
    progress = draft.status.current_progress
    if progress is None or progress.checkpoint_iteration is None:
        return "this attempt has no checkpoint yet"
    newest = f"the newest is of step {progress.checkpoint_iteration}"
    if progress.checkpoint_time is None:
        return f"{newest}, and the trainer, of an earlier release, does not report when it was taken"
    return f"{newest}, taken at {rfc3339(progress.checkpoint_time)}"


def _postponed(draft: PlanBuilder, leaving: Sequence[LeavingNode]) -> str:
    """Return when the next checkpoint is requested, if one was saved on request and is too old; empty otherwise."""
    first = _first_worker(draft)
    before = None if first is None else first.save_request
    if before is None or (saved_at(draft) or 0.0) < before.time:
        return ""
    at = _request_at(draft, before, _names(leaving))
    return f"; no eviction followed it in time, so the next is requested at {rfc3339(at)}" if draft.now < at else ""


def _names(leaving: Sequence[LeavingNode]) -> tuple[str, ...]:
    """Return the nodes that a request names."""
    return tuple(node.name for node in leaving[:NAMED])


def _first_worker(draft: PlanBuilder) -> Worker | None:
    """Return worker 0, to which requests are made."""
    return next((worker for worker in draft.gang if worker.index == 0), None)


def _request(draft: PlanBuilder, leaving: Sequence[LeavingNode]) -> None:
    """Request a checkpoint from the ranks, for nodes without a request, or again after a while."""
    names, first = _names(leaving), _first_worker(draft)
    if first is None or not first.live:
        return
    at = _request_at(draft, first.save_request, names)
    if draft.now < at:
        draft.wake(at)
        return
    request = SaveRequest(attempt=draft.status.attempt, time=int(draft.now), nodes=names)
    draft.actions.append(RequestCheckpoint(index=0, request=request))


def _request_at(draft: PlanBuilder, before: SaveRequest | None, names: Sequence[str]) -> float:
    """Return when the next request is due after the one before."""
    if before is None or before.attempt != draft.status.attempt:
        return draft.now
    if (saved_at(draft) or 0.0) < before.time:
        return before.time + UNANSWERED_S
    return before.time + REPEAT_S if set(names) <= set(before.nodes) else draft.now
