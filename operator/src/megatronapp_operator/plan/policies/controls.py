"""Events of what people change through a job's hub.

The hub's image is the author's choice, so it may tell anything. Its actions have times for ids: what is of the future
waits until it is not, so that no id hides those after it. And a job has so many turns for these events: whoever makes
up actions makes no more events than that, and their others become a number in one of them.
"""

import math
from collections.abc import Iterable

from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.actions import Action, EventType, RecordEvent
from megatronapp_operator.plan.observed import ControlAction
from megatronapp_operator.plan.plan_builder import PlanBuilder

AHEAD_S = 60.0
"""So much may a hub's clock be before ours."""
HUB_MAX_CONTROLS = 256
"""So many actions a hub keeps; an older one keeps fewer."""
MAX_EVENTS = 10
"""Of one look."""
TURNS, TURN_S = 30, 10.0
"""Events at once, and the time after which one of them may come again."""
GAP = "more was changed through the hub than it keeps: the oldest changes may be missing here, and its log tells them"
"""Ids cannot be counted, so nobody knows how many."""


def controls(draft: PlanBuilder) -> None:
    """One event for each thing that somebody has changed through the hub, also of a job that has ended."""
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
    """When all turns will have come back, after these actions."""
    told = sum(isinstance(one, RecordEvent) and one.reason == reasons.SCOPE_CONTROL for one in actions)
    return _spent_until(spent, now) + told * TURN_S


def _spent_until(spent: float, now: float) -> float:
    """A time that no turns can make is that of a clock that was set back."""
    return now if spent > now + TURNS * TURN_S else max(spent, now)


def _describe_controls(news: list[ControlAction], most: int) -> list[str]:
    """One text for each, the oldest first; those that are too many are counted in the last."""
    if len(news) <= most:
        return [one.text for one in news]
    more = len(news) - most + 1
    return [*(one.text for one in news[: most - 1]), f"{more} more changes through the hub, whose log tells them"]
