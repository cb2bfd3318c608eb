"""Events for changes that users make through the hub of a job.

The author of a job chooses the hub's image, so the hub may report anything. Ids of its actions are times: actions from
the future are deferred until their time, so that no id hides later ones. A token bucket limits these Events for each
job; actions beyond it are only counted, in the text of one Event.
"""

import math
from collections.abc import Iterable

from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import Action, EventType, RecordEvent
from megatronapp_operator.plan.observed import ControlAction
from megatronapp_operator.plan.plan_builder import PlanBuilder

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
