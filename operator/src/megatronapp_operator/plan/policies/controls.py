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
TURNS, TURN_S = 30, 10.0
"""Size of the bucket, and seconds until a used token is available again."""
GAP = "more was changed through the hub than it keeps: the oldest changes may be missing here; the hub's log has them"
"""Text without a number: ids have gaps, so the missing changes cannot be counted."""


def controls(draft: PlanBuilder) -> None:
    """Add an Event for each change that users made through the hub, also for a job that has ended."""
    newest = math.floor((draft.now + AHEAD_S) * 1000)
    told = draft.status.last_control
    told = None if told is None or told > newest else told  # of such a hub, or of a clock that was set back
    news = [one for one in draft.observed.controls if one.id <= newest and (told is None or one.id > told)]
    if not news:
        return
    gap = told is not None and len(news) >= HUB_MAX_CONTROLS
    needed, spent = (2 if gap else 1), _spent_until(draft.observed.controls_spent, draft.now)
    turns = math.floor((draft.now + TURNS * TURN_S - spent) / TURN_S + 1e-6)
    if turns < needed:
        draft.wake(spent - (TURNS - needed) * TURN_S)
        return
    texts = [GAP] * gap + _describe_controls(news, min(turns, MAX_EVENTS) - gap)
    for text in texts:
        draft.event(EventType.NORMAL, reasons.SCOPE_CONTROL, text)
    draft.update(last_control=news[-1].id)


def spent_after(spent: float, actions: Iterable[Action], now: float) -> float:
    """Return when the bucket is full again after these actions (seconds since the epoch)."""
    told = sum(isinstance(one, RecordEvent) and one.reason == reasons.SCOPE_CONTROL for one in actions)
    return _spent_until(spent, now) + told * TURN_S


def _spent_until(spent: float, now: float) -> float:
    """Return `spent`, or now if it is past or further ahead than a bucket can be: then a clock was set back."""
    return now if spent > now + TURNS * TURN_S else max(spent, now)


def _describe_controls(news: list[ControlAction], most: int) -> list[str]:
    """Return one text for each change, oldest first; the last one counts those beyond `most`."""
    if len(news) <= most:
        return [one.text for one in news]
    more = len(news) - most + 1
    return [*(one.text for one in news[: most - 1]), f"{more} more changes through the hub; its log lists them"]
