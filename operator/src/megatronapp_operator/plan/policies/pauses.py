"""Pauses of a training that a user has ordered: their condition, their Events, and their cost."""

from megatronapp_common.job.api.progress import PAUSED
from megatronapp_common.job.api.status import TERMINAL_PHASES, ConditionType
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import EventType
from megatronapp_operator.plan.plan_builder import PlanBuilder

HOUR_S = 3600.0


def is_paused(draft: PlanBuilder) -> bool:
    """Return True if the ranks of this attempt have reported that they are paused."""
    progress = draft.status.current_progress
    if draft.status.phase in TERMINAL_PHASES or draft.status.running_time is None or progress is None:
        return False
    return progress.state == PAUSED


def report_pause(draft: PlanBuilder) -> None:
    """Set the condition Paused while a pause lasts, with an Event when it begins and one with its cost when it ends.

    The message has the cost of a minute, and not the cost so far: a message that changes is a write to the API server.
    """
    known = draft.status.condition(ConditionType.PAUSED)
    gpus = sum(group.nodes * group.gpus_per_node for group in draft.job.spec.worker_groups)
    if is_paused(draft):
        assert draft.status.progress is not None
        cost = f"; {gpus} GPUs are idle, {gpus * 60 / HOUR_S:.2f} GPU-hours per minute" if gpus else ""
        message = f"the training is paused after {draft.status.progress.iteration} steps{cost}"
        if known is None or not known.status:
            draft.event(EventType.NORMAL, reasons.PAUSED_BY_ORDER, message)
        draft.set_condition(ConditionType.PAUSED, True, reasons.PAUSED_BY_ORDER, message)
        return
    if known is None or not known.status:
        return
    seconds = max(0.0, draft.now - known.since)
    cost = f": {gpus} GPUs x {seconds:.0f} s = {gpus * seconds / HOUR_S:.2f} GPU-hours" if gpus else ""
    message = f"the pause has ended after {seconds:.0f} s{cost}"
    draft.event(EventType.NORMAL, reasons.PAUSE_ENDED, message)
    draft.clear_condition(ConditionType.PAUSED, reasons.PAUSE_ENDED, message)
