"""Gangs whose workers all run and do not find each other."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_operator.plan import (
    ConditionType,
    DeleteWorker,
    FailureAction,
    FailureMatch,
    FailureRule,
    Phase,
    Progress,
)
from megatronapp_operator.plan.policies.deadlines import SILENCE_S

Maker = Callable[..., Any]


@pytest.fixture
def gathering(plan_harness: Maker, worker: Maker) -> Callable[..., Any]:
    """Make a gang that runs, whose worker 0 waits for worker 1 and has just been asked."""

    def make(**policy: Any) -> Any:
        made = plan_harness(start_deadline_s=900, silent_start_s=300, **policy)
        made.plan()
        made.see(worker(0), dataclasses.replace(worker(1), node="gpu-3"), missing=(1,), last_contact=made.now)
        made.plan()
        return made

    return make


def test_who_does_not_reach_worker_0_ends_the_attempt_when_the_deadline_is_over(gathering: Maker) -> None:
    made = gathering()
    made.see(*made.observed.workers, last_contact=made.now + 899)
    made.now += 899
    assert (made.plan().status.failures, made.job.status.phase) == ((), Phase.STARTING)
    made.now += 1
    assert made.plan().status.failures == ()  # no worker was asked since
    assert made.plan().wake_at == made.now + 15
    made.now += 15
    made.see(*made.observed.workers, last_contact=made.now)
    failure = made.plan().status.failures[-1]
    assert (failure.reason, failure.worker, failure.node) == ("NotGathered", 1, "gpu-3")
    assert failure.action is FailureAction.RESTART
    assert {type(action) for action in made.plan().actions} == {DeleteWorker}


def test_a_gang_that_still_gathers_has_not_begun_to_train(gathering: Maker) -> None:
    made = gathering()
    made.now += 400
    assert made.plan().status.phase is Phase.STARTING
    made.see(*made.observed.workers, missing=())
    assert made.plan().status.phase is Phase.RUNNING


def test_a_gang_that_has_reported_progress_has_gathered(gathering: Maker) -> None:
    made = gathering()
    made.now += 1000
    made.see(*made.observed.workers, last_contact=made.now, progress=Progress(attempt=0, iteration=0, state="starting"))
    assert made.plan().status.failures == ()


def test_workers_that_still_prepare_are_waited_for(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=900)
    made.plan()
    made.see(worker(0), dataclasses.replace(worker(1, "Pending"), preparing=True), missing=(1,), last_contact=1e9)
    made.now += 50_000
    assert made.plan().status.failures == ()


def test_a_failure_rule_may_decide_on_a_gang_that_did_not_gather(gathering: Maker) -> None:
    rule = FailureRule(match=FailureMatch(reasons=("NotGathered",)), action=FailureAction.EXCLUDE_AND_RESTART)
    made = gathering(rules=(rule,))
    made.now += 900
    made.see(*made.observed.workers, last_contact=made.now)
    assert [node.node for node in made.plan().status.excluded_nodes] == ["gpu-3"]


@pytest.mark.parametrize("taken", [{"disrupted": "EvictionByEvictionAPI"}, {"unreachable_since": 1.0}])
def test_no_failure_is_recorded_while_the_cluster_removes_a_worker(gathering: Maker, taken: dict[str, Any]) -> None:
    made = gathering(lost_worker_s=1e9)
    made.now += 1000
    first, second = made.observed.workers
    made.see(first, dataclasses.replace(second, **taken), last_contact=made.now)
    assert (made.plan().status.failures, made.plan().wake_at) == ((), made.now + 15)
    made.see(first, second, last_contact=made.now)
    assert made.plan().status.failures[-1].reason == "NotGathered"


def test_users_are_warned_when_the_gathering_cannot_be_observed(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=900, silent_start_s=300)
    made.plan()
    made.see(worker(0), worker(1), missing=(), last_contact=0.0)
    made.plan()
    made.now += SILENCE_S - 1
    assert not made.plan().status.is_true(ConditionType.STALLED)
    made.now += 1
    stalled = made.plan().status.condition(ConditionType.STALLED)
    assert (stalled.status, stalled.reason) == (True, "ProgressUnknown")
    made.now += 50_000
    assert made.plan().status.failures == ()
    made.see(*made.observed.workers, last_contact=made.now)
    assert not made.plan().status.is_true(ConditionType.STALLED)


def test_a_job_whose_stalled_workers_are_deleted_is_not_stalled(running: Maker, worker: Maker) -> None:
    made = running(progress_deadline_s=20, start_deadline_s=900)
    made.now += 20
    assert made.plan().status.is_true(ConditionType.STALLED)
    made.see(worker(0, grace=30.0), worker(1, grace=30.0))
    assert made.plan().status.is_true(ConditionType.STALLED), "they are still there"
    made.see()
    stalled = made.plan().status.condition(ConditionType.STALLED)
    assert (stalled.status, stalled.reason) == (False, "WorkersGone")
    made.now += 10
    made.plan()
    made.see(worker(0, "Pending", attempt=1), dataclasses.replace(worker(1, "Pending", attempt=1), scheduled=False))
    made.plan()
    made.now += 900
    status = made.plan().status
    assert (status.phase, status.is_true(ConditionType.STALLED)) == (Phase.PENDING, False)
