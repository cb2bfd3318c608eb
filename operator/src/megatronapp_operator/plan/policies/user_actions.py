"""Changes that users make through the hub of a job: their Events, and the condition and cost of a pause.

The author of a job chooses the hub's image, so the hub may report anything. Ids of its actions are times: actions from
the future are deferred until their time, so that no id hides later ones. A token bucket limits these Events for each
job; actions beyond it are only counted, in the text of one Event.
"""

import math
from collections.abc import Iterable

from megatronapp_common.job.api.progress import PAUSED
from megatronapp_common.job.api.status import TERMINAL_PHASES, ConditionType
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import Action, EventType, RecordEvent
from megatronapp_operator.plan.observed import ControlAction
from megatronapp_operator.plan.plan_builder import PlanBuilder

HOUR_S = 3600.0
AHEAD_S = 60.0
"""Seconds by which a hub's clock may be ahead of ours."""
HUB_MAX_CONTROLS = 256
"""Actions that a hub keeps; older releases keep fewer."""
MAX_EVENTS = 10
"""Most Events of one reconcile."""
BUCKET_SIZE, REFILL_S = 30, 10.0
"""Size of the bucket, and seconds until a used token is available again."""
GAP = "more was changed through the hub than it keeps: the oldest changes may be missing here; the hub's log has them"
"""Text without a number: ids have gaps, so the missing changes cannot be counted."""


def controls(draft: PlanBuilder) -> None:
    """Add an Event for each change that users made through the hub, also for a job that has ended."""
    newest = math.floor((draft.now + AHEAD_S) * 1000)
    reported = draft.status.last_control
    if reported is not None and reported > newest:
        reported = None  # by a hub whose clock was ahead, or ours was set back
    known = [control for control in draft.observed.controls if control.id <= newest]
    new = [control for control in known if reported is None or control.id > reported]
    if not new:
        return
    gap = reported is not None and len(new) >= HUB_MAX_CONTROLS
    needed, spent = (2 if gap else 1), _spent_until(draft.observed.controls_spent, draft.now)
    available = math.floor((draft.now + BUCKET_SIZE * REFILL_S - spent) / REFILL_S + 1e-6)
    if available < needed:
        draft.wake(spent - (BUCKET_SIZE - needed) * REFILL_S)
        return
    texts = [GAP] * gap + _describe_controls(new, min(available, MAX_EVENTS) - gap)
    for text in texts:
        draft.event(EventType.NORMAL, reasons.SCOPE_CONTROL, text)
    draft.update(last_control=new[-1].id)


def spent_after(spent: float, actions: Iterable[Action], now: float) -> float:
    """Return when the bucket is full again after these actions (seconds since the epoch)."""
    events = sum(isinstance(action, RecordEvent) and action.reason == reasons.SCOPE_CONTROL for action in actions)
    return _spent_until(spent, now) + events * REFILL_S


def _spent_until(spent: float, now: float) -> float:
    """Return `spent`, or now if it is past or further ahead than a bucket can be: then a clock was set back."""
    return now if spent > now + BUCKET_SIZE * REFILL_S else max(spent, now)


def _describe_controls(new: list[ControlAction], most: int) -> list[str]:
    """Return one text for each change, oldest first; the last one counts those beyond `most`."""
    if len(new) <= most:
        return [control.text for control in new]
    more = len(new) - most + 1
    return [*(control.text for control in new[: most - 1]), f"{more} more changes through the hub; its log lists them"]


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
