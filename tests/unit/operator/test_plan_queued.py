"""Gangs that a queue or a gang scheduler places."""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import ConditionType, Progress

Maker = Callable[..., Any]


def test_the_active_deadline_of_a_queued_gang_counts_only_what_it_holds_machines(scene: Maker, worker: Maker) -> None:
    made = scene(active_deadline_s=50)
    made.spec(gang=True)
    made.plan()
    for attempt in (0, 1):  # twice an hour in the queue, and 30 s with machines
        waiting = [dataclasses.replace(worker(index, "Pending", attempt=attempt), scheduled=False) for index in (0, 1)]
        made.see(*waiting)
        assert made.plan().wake_at is None
        made.now += 3600
        assert not made.plan().status.is_true(ConditionType.FAILURE_TARGET)
        made.see(*(worker(index, attempt=attempt) for index in (0, 1)), progress=Progress(attempt=attempt, iteration=1))
        made.plan()
        if attempt == 0:
            made.now += 30
            made.see(*(worker(index, "Failed", ExitCode.PREEMPTED, made.now) for index in (0, 1)))
            made.plan()
            made.see()
            made.now += 10
            made.plan()
    assert made.plan().wake_at == made.now + 20
    made.now += 20
    assert made.plan().status.condition(ConditionType.FAILURE_TARGET).reason == "DeadlineExceeded"


def test_the_active_deadline_begins_anew_when_a_queued_job_is_resumed(scene: Maker, worker: Maker) -> None:
    made = scene(active_deadline_s=50)
    made.spec(gang=True)
    made.plan()
    made.see(worker(0), worker(1))
    made.plan()
    made.now += 40
    made.spec(suspend=True)
    made.plan()
    made.see()
    made.spec(suspend=False)
    made.plan()
    made.see(worker(0, attempt=1), worker(1, attempt=1))
    made.plan()
    made.now += 40
    assert not made.plan().status.is_true(ConditionType.FAILURE_TARGET)
    made.now += 10
    assert made.plan().status.is_true(ConditionType.FAILURE_TARGET)
