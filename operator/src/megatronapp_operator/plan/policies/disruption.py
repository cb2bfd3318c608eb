"""Protection of a gang from voluntary evictions: those of drains and autoscalers, which a budget refuses.

One lost worker restarts the whole gang, so a budget allows either no eviction or any. The condition is the memory: a
job without it has never had a budget, and costs no request.
"""

from megatronapp_common.job.api.status import TERMINAL_PHASES, ConditionType, Phase
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import EnsureDisruptionBudget, EventType, RemoveDisruptionBudget
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.spec import Disruption

RETRY_S = 600.0
"""Seconds until a budget that was refused is tried again. The rights may change while a job runs."""


def guard(draft: PlanBuilder) -> None:
    """Set or remove the budget of the job, and report it. It follows all other decisions of a pass."""
    if draft.job.deletion_requested:
        return  # the garbage collector removes it
    refuses, refusal = _refuses(draft), draft.observed.budget_refusal
    _report(draft, refuses=refuses, refusal=refusal)
    if refusal and refuses:
        draft.wake(draft.now + RETRY_S)
        return
    has_had = draft.status.condition(ConditionType.EVICTIONS_REFUSED) is not None
    if has_had and draft.observed.disruption_budget is not refuses:
        draft.actions.append(EnsureDisruptionBudget() if refuses else RemoveDisruptionBudget())


def _refuses(draft: PlanBuilder) -> bool:
    """Return True if no worker may be evicted now."""
    return draft.job.spec.policy.disruption is Disruption.PROTECT and _has_gang(draft)


def _has_gang(draft: PlanBuilder) -> bool:
    """Return True from the creation of a gang until its attempt or the job is over, and it can lose nothing."""
    status = draft.status
    rests = status.phase in TERMINAL_PHASES | {Phase.SUSPENDED} or status.is_true(ConditionType.FAILURE_TARGET)
    return status.attempt_time is not None and not rests


def _report(draft: PlanBuilder, *, refuses: bool, refusal: str) -> None:
    """Set the condition; an Event says why no budget could be set."""
    kind, known = ConditionType.EVICTIONS_REFUSED, draft.status.condition(ConditionType.EVICTIONS_REFUSED)
    if refuses and refusal:
        if known is None or known.reason != reasons.BUDGET_REFUSED:
            draft.event(EventType.WARNING, reasons.BUDGET_REFUSED, f"evictions are not refused: {refusal}")
        draft.set_condition(kind, False, reasons.BUDGET_REFUSED, f"evictions are not refused: {refusal}")
    elif refuses:
        draft.set_condition(kind, True, reasons.PROTECTED, "runPolicy.disruption is Protect: no worker may be evicted")
    elif known is not None and known.reason != reasons.EVICTIONS_ALLOWED:
        draft.set_condition(kind, False, reasons.EVICTIONS_ALLOWED, "no gang is protected from evictions")
