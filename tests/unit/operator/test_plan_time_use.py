"""Uses of the time of a job, and its effective training time ratio."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_common.job import read_status, status_document
from megatronapp_common.job.api.progress import ProgressState, TimeUse
from megatronapp_operator.plan import Phase, Progress, SlowRank

Maker = Callable[..., Any]


def advance(made: Any, seconds: float, iteration: int, *, attempt: int = 0, state: ProgressState = "training") -> None:
    """Let time pass, and report a step."""
    made.now += seconds
    page = Progress(attempt=attempt, iteration=iteration, state=state)
    made.see(*made.observed.workers, progress=page)
    made.plan()


def seconds(made: Any) -> dict[str, float]:
    """Seconds by use, without those that are zero."""
    return {use.value: found for use, found in made.job.status.time_spent.seconds().items() if found}


def test_a_life_with_a_failure_is_accounted_for(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.plan()
    made.now += 30
    made.see(*(dataclasses.replace(worker(index, "Pending"), scheduled=False) for index in range(2)))
    made.plan()
    made.see(worker(0, "Pending"), worker(1, "Pending"))
    made.plan()
    made.now += 20
    made.see(worker(0), worker(1))
    advance(made, 0, 0, state="starting")
    advance(made, 40, 0)
    assert seconds(made) == {"queueing": 30, "starting": 60}
    advance(made, 100, 10)
    advance(made, 100, 20)
    assert seconds(made)["trained"] == 200
    made.now += 15
    made.see(worker(0, "Failed", 1, at=made.now), worker(1, "Failed", 69, at=made.now))
    made.plan()
    assert (seconds(made)["failures"], made.job.status.attempt) == (15, 1)
    made.see()
    made.now += 10
    made.plan()
    made.see(worker(0, attempt=1), worker(1, attempt=1))
    advance(made, 50, 16, attempt=1, state="starting")  # the checkpoint of step 16
    assert seconds(made)["failures"] == 15 + 4 * 10
    advance(made, 5, 16, attempt=1)
    found = seconds(made)
    assert (found["trained"], found["restarts"]) == (160, 65)
    advance(made, 100, 26, attempt=1)
    spent = made.job.status.time_spent
    assert sum(spent.seconds().values()) == spent.since - 1000.0
    assert spent.ratio == pytest.approx(260 / (90 + 200 + 15 + 65 + 100))


def test_checkpoints_pauses_and_slow_ranks_are_taken_off(running: Maker) -> None:
    made = running()
    advance(made, 10, 1)
    advance(made, 10, 2, state="saving")
    advance(made, 7, 2)
    assert seconds(made)["checkpoints"] == 7
    advance(made, 1, 2, state="paused")
    advance(made, 300, 2)
    assert seconds(made)["suspended"] == 300
    verdict = SlowRank(id="v", subject="rank", ranks=(0,), cause="compute", state="confirmed", seconds_per_step=1.5)
    made.see(*made.observed.workers, slow_ranks=(verdict,))
    made.plan()
    before = seconds(made)["trained"]
    advance(made, 40, 6)
    assert (seconds(made)["slow"], seconds(made)["trained"] - before) == (6, 34)


def test_the_time_of_a_suspended_job_is_counted_apart(running: Maker) -> None:
    made = running()
    advance(made, 50, 5)
    made.spec(suspend=True)
    made.plan()
    made.now += 1000
    made.see()
    made.spec(suspend=False)
    made.plan()
    assert (seconds(made)["suspended"], seconds(made)["trained"]) == (1000, 50)


def test_an_ended_job_is_not_charged_any_more(running: Maker, worker: Maker) -> None:
    made = running()
    advance(made, 50, 5)
    made.see(worker(0, "Succeeded", 0), worker(1, "Succeeded", 0))
    made.now += 2
    made.plan()
    assert made.job.status.phase is Phase.SUCCEEDED
    before = made.job.status.time_spent
    made.now += 1000
    made.plan()
    assert made.job.status.time_spent == before
    assert seconds(made)["trained"] == 52


def test_the_account_is_read_as_it_was_written(running: Maker) -> None:
    made = running()
    advance(made, 12.345678, 5)
    document = status_document(made.job.status)
    assert set(document["timeSpent"]) >= {use.value for use in TimeUse}
    assert read_status(document).time_spent == made.job.status.time_spent


def test_time_that_does_not_change_its_use_is_added_once_a_minute(plan_harness: Maker) -> None:
    made = plan_harness()
    made.plan()
    for _ in range(5):
        made.now += 29
        made.plan()
    assert seconds(made) == {"queueing": 87}


def test_a_gang_without_nodes_is_in_the_queue_also_after_a_restart(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.spec(gang=True)
    made.status(attempt=1, restarts=1)
    made.plan()
    made.now += 70
    made.see(*(dataclasses.replace(worker(index, "Pending", attempt=1), scheduled=False) for index in range(2)))
    made.plan()
    made.see(worker(0, "Pending", attempt=1), worker(1, "Pending", attempt=1))
    made.plan()
    made.now += 80
    made.plan()
    found = seconds(made)
    assert (found["queueing"], found["restarts"]) == (70, 80)


def test_an_end_to_grow_is_a_restart_in_the_account_though_it_is_not_counted(plan_harness: Maker) -> None:
    made = plan_harness()
    made.status(attempt=1, last_restart_time=made.now)
    made.plan()
    made.now += 80
    made.plan()
    assert (seconds(made), made.job.status.restarts) == ({"restarts": 80}, 0)


def test_a_served_model_has_no_account(plan_harness: Maker) -> None:
    made = plan_harness()
    made.spec(serves=True)
    made.plan()
    assert made.job.status.time_spent is None


def restarted(made: Any, worker: Maker, attempt: int) -> None:
    """Let a rank fail, and the next attempt run."""
    former = attempt - 1
    made.see(worker(0, "Failed", 1, at=made.now, attempt=former), worker(1, "Failed", 69, at=made.now, attempt=former))
    made.plan()
    made.see()
    made.now += 40
    made.plan()
    made.see(worker(0, attempt=attempt), worker(1, attempt=attempt))
    made.plan()


def test_repeated_steps_cost_the_mean_of_the_attempt_that_lost_them(running: Maker, worker: Maker) -> None:
    made = running()
    advance(made, 100, 10)
    restarted(made, worker, 1)
    advance(made, 1, 0, attempt=1, state="starting")  # it has not loaded its checkpoint yet
    assert seconds(made).get("failures", 0) == 0
    advance(made, 1, 10, attempt=1)
    advance(made, 50, 20, attempt=1)
    restarted(made, worker, 2)
    advance(made, 1, 18, attempt=2)
    found = seconds(made)
    assert (found["trained"], found["failures"]) == (100 + 50 - 2 * 5, 2 * 5)


def test_a_checkpoint_beyond_the_last_step_that_was_seen_costs_nothing(running: Maker, worker: Maker) -> None:
    made = running()
    advance(made, 100, 10)
    restarted(made, worker, 1)
    advance(made, 1, 12, attempt=1)
    found = seconds(made)
    assert (found["trained"], found.get("failures", 0)) == (100, 0)


def test_slow_ranks_cost_no_more_than_the_time_of_the_steps(running: Maker) -> None:
    made = running()
    advance(made, 10, 1)
    verdict = SlowRank(id="v", subject="rank", ranks=(0,), cause="compute", state="confirmed", seconds_per_step=50.0)
    made.see(*made.observed.workers, slow_ranks=(verdict,))
    made.plan()
    advance(made, 40, 3)
    assert seconds(made) == {"trained": 10, "slow": 40}


def test_steps_that_are_reported_while_ranks_save_add_no_training(running: Maker) -> None:
    made = running()
    advance(made, 10, 1)
    advance(made, 10, 2, state="saving")
    advance(made, 30, 3, state="saving")
    advance(made, 1, 3)
    found = seconds(made)
    assert (found["trained"], found["checkpoints"]) == (20, 31)
