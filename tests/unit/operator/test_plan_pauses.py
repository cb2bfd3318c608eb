"""Condition, Events and deadline of a training that a user has paused."""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatronapp_common.job.api.progress import Progress, ProgressState
from megatronapp_common.job.api.status import ConditionType
from megatronapp_operator.plan.actions import RecordEvent

Maker = Callable[..., Any]


def observe(made: Any, state: ProgressState, iteration: int, *, contact: bool = True) -> Any:
    """Observe a progress document, and plan."""
    progress = Progress(attempt=0, iteration=iteration, state=state)
    answered = made.now if contact else made.observed.last_contact
    made.observed = dataclasses.replace(made.observed, progress=progress, last_contact=answered)
    return made.plan()


def events(plan: Any, reason: str) -> list[str]:
    return [action.message for action in plan.actions if isinstance(action, RecordEvent) and action.reason == reason]


def test_a_pause_is_a_condition_with_its_cost_and_has_no_deadline(running: Maker) -> None:
    made = running(progress_deadline_s=20)
    groups = made.job.spec.worker_groups
    with_gpus = tuple(dataclasses.replace(group, gpus_per_node=8) for group in groups)
    gpus = sum(group.nodes * 8 for group in groups)
    spec = dataclasses.replace(made.job.spec, worker_groups=with_gpus)
    made.job = dataclasses.replace(made.job, spec=spec)
    first = observe(made, "paused", 7)
    (began,) = events(first, "PausedByOrder")
    assert began.startswith("the training is paused after 7 steps") and f"{gpus} GPUs are idle" in began
    for _ in range(10):
        made.now += 15
        later = observe(made, "paused", 7)
        assert later.status.attempt == 0 and later.status.is_true(ConditionType.PAUSED)
        assert not events(later, "PausedByOrder")
    resumed = observe(made, "training", 7)
    assert not resumed.status.is_true(ConditionType.PAUSED)
    (ended,) = events(resumed, "PauseEnded")
    assert ended == f"the pause has ended after 150 s: {gpus} GPUs x 150 s = {gpus * 150 / 3600:.2f} GPU-hours"
    made.now += 21
    assert observe(made, "training", 7).status.attempt == 1, "the deadline holds again"


def test_a_pause_of_which_nothing_is_known_any_more_ends_by_the_deadline(running: Maker) -> None:
    made = running(progress_deadline_s=20, unheard_s=30)
    observe(made, "paused", 7)
    made.now += 21
    assert observe(made, "paused", 7, contact=False).status.is_true(ConditionType.STALLED)
    made.now += 31
    assert observe(made, "paused", 7, contact=False).status.attempt == 1
