"""Machines that do not report: given up in their time, unless the gang is seen to train without their reports."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from worker_groups import worker_groups

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import DeleteWorker, FailureAction, Phase, Progress, RecordEvent

Maker = Callable[..., Any]
UNCOUNTED = FailureAction.RESTART_IGNORE_MAX


def backend_actions(made: Any) -> list[Any]:
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def on(worker: Any, node: str, **changes: Any) -> Any:
    return dataclasses.replace(worker, node=node, **changes)


def last(made: Any) -> tuple[str, str | None, FailureAction]:
    failure = made.status.failures[-1]
    return failure.reason, failure.node, failure.action


def test_a_worker_on_an_unreachable_node_is_given_up_before_its_deletion(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300, grace_s=600, max_restarts=0)
    made.now += 40
    unreachable = on(worker(1), "gpu-3", unreachable_since=made.now - 40)
    made.see(on(worker(0), "gpu-2"), unreachable)
    assert made.plan().wake_at == made.now + 260
    made.now += 260
    lost = made.plan()
    assert last(lost) == ("LostNode", "gpu-3", UNCOUNTED)
    assert "has not answered for 300 s" in lost.status.failures[-1].message
    assert backend_actions(lost) == [
        DeleteWorker(index=0, attempt=0, grace_s=600),
        DeleteWorker(index=1, attempt=0, grace_s=0),
    ]
    assert (lost.status.restarts, lost.status.restarts_towards_max) == (1, 0)


def test_a_node_that_recovers_in_time_costs_nothing(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    made.see(worker(0), on(worker(1), "gpu-3", unreachable_since=made.now))
    made.plan()
    made.see(worker(0), on(worker(1), "gpu-3"))
    made.now += 10_000
    assert (made.plan().status.failures, made.job.status.phase) == ((), Phase.RUNNING)


def test_a_gang_without_any_reachable_node_is_left_alone(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    unreachable = [on(worker(index), f"gpu-{index}", unreachable_since=made.now) for index in (0, 1)]
    made.see(*unreachable)
    made.now += 1200
    assert (backend_actions(made.plan()), made.job.status.failures) == ([], ())
    made.see(on(worker(0), "gpu-0", reachable_since=made.now), unreachable[1])
    assert (backend_actions(made.plan()), made.plan().wake_at) == ([], made.now + 300)
    made.now += 300
    assert last(made.plan()) == ("LostNode", "gpu-1", UNCOUNTED)


def trains(made: Any, iteration: int, attempt: int = 0) -> Any:
    page = Progress(attempt=attempt, iteration=iteration, updated_at=made.now)
    made.observed = dataclasses.replace(made.observed, progress=page)
    return made.plan()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gang_with_progress_is_not_lost_whatever_its_nodes_report(
    plan_harness: Maker, worker: Maker, workers: int
) -> None:
    made = plan_harness(lost_worker_s=300, max_restarts=0)
    made.spec(worker_groups=worker_groups(workers))
    made.plan()
    made.see(*(worker(index) for index in range(workers)), progress=Progress(attempt=0, iteration=0))
    made.plan()
    unreachable = on(worker(workers - 1), "gpu-3", unreachable_since=made.now)
    made.see(*(on(worker(index), "gpu-2") for index in range(workers - 1)), unreachable)
    for iteration in range(1, 10):
        made.now += 200
        plan = trains(made, iteration)
        assert (backend_actions(plan), plan.status.failures, plan.wake_at) == ([], (), made.now + 300)
    made.now += 299
    assert made.plan().status.failures == ()
    made.now += 1
    assert last(made.plan()) == ("LostNode", "gpu-3", UNCOUNTED)


def test_progress_of_an_older_attempt_saves_no_lost_node(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    made.see(on(worker(0), "gpu-2"), on(worker(1, "Failed", 1), "gpu-3"))
    made.plan()
    lost = on(worker(0), "gpu-2", unreachable_since=made.now)
    made.see(lost, progress=Progress(attempt=0, iteration=7, updated_at=made.now))
    made.now += 300
    assert DeleteWorker(index=0, attempt=0, grace_s=0) in backend_actions(made.plan())


def test_a_document_from_before_is_no_progress(running: Maker) -> None:
    made = running()
    made.now += 100
    before = trains(made, 7).status
    stale = Progress(attempt=0, iteration=3, updated_at=made.now - 50)
    made.now += 100
    made.observed = dataclasses.replace(made.observed, progress=stale)
    assert made.plan().status == before
    again = dataclasses.replace(stale, iteration=8)  # further on, by a clock that was set back
    made.observed = dataclasses.replace(made.observed, progress=again)
    after = made.plan().status
    assert after.progress is not None and (after.progress.iteration, after.progress_time) == (8, made.now)


def test_who_leaves_such_a_gang_at_the_bidding_of_the_cluster_is_given_up(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    going = [on(worker(index, grace=30.0), f"gpu-{index}", unreachable_since=made.now) for index in (0, 1)]
    made.see(*going)
    assert made.plan().wake_at == made.now + 330
    made.now += 330
    assert last(made.plan())[0] == "LostNode"


@pytest.mark.parametrize(("nodes", "second"), [(("a", "a"), "Running"), (("a", "b"), "Failed")])
def test_a_partly_reachable_or_single_node_gang_is_not_left_alone(
    running: Maker, worker: Maker, nodes: tuple[str, str], second: str
) -> None:
    made = running(lost_worker_s=300)
    since = made.now if second == "Running" else None
    ended = worker(1, second, None if since else ExitCode.PREEMPTED)
    made.see(on(worker(0), nodes[0], unreachable_since=made.now), on(ended, nodes[1], unreachable_since=since))
    made.now += 300
    assert DeleteWorker(index=0, attempt=0, grace_s=0) in backend_actions(made.plan())


def test_a_terminating_worker_on_a_lost_node_is_not_awaited_for_its_grace(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300, grace_s=600)
    made.now += 299
    going = on(worker(1, grace=600.0), "gpu-3", unreachable_since=made.now - 299)
    made.see(worker(0), going)
    made.now += 1
    assert DeleteWorker(index=1, attempt=0, grace_s=0) in backend_actions(made.plan())
