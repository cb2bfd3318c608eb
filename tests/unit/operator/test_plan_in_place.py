"""Restart in place: which pods continue with the next attempt, and when they are given up."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from seen_pods import actions, sound, standby
from worker_groups import worker_groups

from megatronapp_common.job.api.status import ExcludedNode, Failure
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    CreateWorker,
    DeleteWorker,
    Deletion,
    FailureAction,
    Phase,
    Progress,
    RestartWorker,
    WorkerOutcome,
)

Maker = Callable[..., Any]


@pytest.fixture
def failing(running: Maker, worker: Maker) -> Maker:
    """A gang whose rank 1 has failed, and the plan about it; `changes` are those of its worker."""

    def make(code: int = 1, changes: dict[str, Any] | None = None, **policy: Any) -> Any:
        made = running(in_place=True, **policy)
        made.see(standby(worker(0), ExitCode.PEER_LOST), standby(worker(1), code, **(changes or {})))
        return made

    return make


def test_sound_pods_continue_after_the_back_off(failing: Maker) -> None:
    made = failing()
    plan = made.plan()
    assert actions(plan) == []
    assert (plan.status.attempt, plan.status.restarts_towards_max, plan.status.phase) == (1, 1, Phase.RESTARTING)
    assert (plan.status.failures[-1].worker, plan.status.failures[-1].rank) == (1, 1)
    assert plan.wake_at == made.now + 10
    made.now += 10
    plan = made.plan()
    assert actions(plan) == [RestartWorker(index=index, attempt=1, grace_s=5.0) for index in range(2)]
    assert plan.status.attempt_time == made.now


def test_an_order_is_repeated_until_it_is_seen(failing: Maker, worker: Maker) -> None:
    """The operator may end between two orders."""
    made = failing()
    made.plan()
    made.now += 10
    made.plan()
    made.see(sound(worker(0, attempt=1)), made.observed.workers[1])
    assert actions(made.plan()) == [RestartWorker(index=1, attempt=1, grace_s=5.0)]
    made.see(sound(worker(0, attempt=1)), sound(worker(1, attempt=1)))
    assert actions(made.plan()) == []
    made.see(*made.observed.workers, progress=Progress(attempt=1, iteration=3))
    assert made.plan().status.phase is Phase.RUNNING


@pytest.mark.parametrize(
    "changes",
    [
        {"deletion": Deletion(since=1000.0, grace_s=30.0)},
        {"disrupted": "Evicted"},
        {"unreachable_since": 990.0},
        {"reusable": False},
    ],
    ids=["deleted", "disrupted", "unreachable", "edited"],
)
def test_a_pod_at_fault_is_replaced_and_the_others_continue(
    failing: Maker, worker: Maker, changes: dict[str, Any]
) -> None:
    made = failing(changes=changes)
    expected = [] if "deletion" in changes else [DeleteWorker(index=1, attempt=0, grace_s=5.0)]
    assert [action for action in actions(made.plan()) if isinstance(action, DeleteWorker)] == expected
    made.now += 10
    made.see(made.observed.workers[0])
    assert [type(action) for action in actions(made.plan())] == [RestartWorker, CreateWorker]


@pytest.mark.parametrize("exclusion", [True, False])
def test_a_broken_device_costs_the_pod_its_node(failing: Maker, exclusion: bool) -> None:
    made = failing(code=201)
    if not exclusion:
        policy = made.job.spec.policy
        made.spec(
            policy=dataclasses.replace(policy, exclusion=dataclasses.replace(policy.exclusion, enabled=False)),
        )
    plan = made.plan()
    assert actions(plan) == [DeleteWorker(index=1, attempt=0, grace_s=5.0)]
    assert [listed.node for listed in plan.status.excluded_nodes] == (["n1"] if exclusion else [])


def test_the_second_failure_in_a_row_replaces_the_pod(failing: Maker, worker: Maker) -> None:
    made = failing()
    made.plan()
    made.now += 10
    made.plan()
    again = [standby(worker(0, attempt=1), ExitCode.PEER_LOST), standby(worker(1, attempt=1), 1)]
    made.see(*again)
    assert actions(made.plan()) == [DeleteWorker(index=1, attempt=1, grace_s=5.0)]
    made.see(again[0])
    made.now += 20
    restarted = RestartWorker(index=0, attempt=2, grace_s=5.0)
    assert actions(made.plan()) == [restarted, CreateWorker(index=1, attempt=2)]


@pytest.mark.parametrize(("launcher", "missing", "late"), [(1, (1,), 1), (0, (), 0)], ids=["worker-1", "worker-0"])
def test_a_launcher_that_does_not_continue_loses_its_pod(
    failing: Maker, worker: Maker, launcher: int, missing: tuple[int, ...], late: int
) -> None:
    made = failing()
    made.plan()
    made.now += 10
    made.plan()
    seen = [sound(worker(index, attempt=1)) for index in range(2)]
    made.see(*seen, launcher_attempt=launcher, missing=missing)
    plan = made.plan()
    assert actions(plan) == [] and plan.wake_at == made.now + 65
    made.now += 65
    plan = made.plan()
    assert actions(plan) == [DeleteWorker(index=late, attempt=1, grace_s=5.0)]
    assert (plan.status.failures[-1].reason, plan.status.failures[-1].worker) == ("NotGathered", late)
    assert (plan.status.restarts, plan.status.restarts_towards_max) == (2, 1), "the budget pays for the failure alone"
    made.see(*(known for known in made.observed.workers if known.index != late))
    assert actions(made.plan()) == []  # others of this attempt are not blamed, also once its answer is gone
    made.see(*made.observed.workers, launcher_attempt=None, missing=())
    made.now += 40
    assert [type(action) for action in actions(made.plan())].count(CreateWorker) == 1


def rejoining(failing: Maker, worker: Maker, seen: tuple[dict[str, Any], ...] = ({}, {}), **policy: Any) -> Any:
    """A gang that was ordered to continue with attempt 1; worker 0 waits for worker 1, and its time is over."""
    made = failing(**policy)
    made.plan()
    made.now += 10
    made.plan()
    workers = [sound(worker(index, attempt=1), **changes) for index, changes in enumerate(seen)]
    made.see(*workers, launcher_attempt=1, missing=(1,))
    made.plan()
    made.now += 65
    return made


@pytest.mark.parametrize(
    ("seen", "others"),
    [
        (({}, {"disrupted": "PreemptionByScheduler"}), {}),
        (({"unreachable_since": 1020.0}, {}), {}),
        (({}, {"started_at": 1015.0}), {}),
        (({}, {"started_at": None}), {}),
        (({}, {}), {"last_contact": 1070.0}),
        (({}, {}), {"missing": ()}),
        (({}, {}), {"launcher_attempt": None}),
        (({}, {}), {"progress": Progress(attempt=1, iteration=0, state="starting")}),
    ],
    ids=["disrupted", "lost node", "new pod", "not started", "old answer", "all joined", "no answer", "starts"],
)
def test_a_launcher_is_not_late(
    failing: Maker, worker: Maker, seen: tuple[dict[str, Any], ...], others: dict[str, Any]
) -> None:
    made = rejoining(failing, worker, seen)
    made.see(*made.observed.workers, **others)
    assert actions(made.plan()) == []
    assert made.job.status.attempt == 1


def test_launchers_wait_for_new_pods_as_long_as_these_may_take(failing: Maker, worker: Maker) -> None:
    made = rejoining(failing, worker, ({}, {"started_at": 1015.0}))
    made.spec(worker_groups=worker_groups(3))
    third = dataclasses.replace(sound(worker(2, attempt=1)), started_at=900.0)
    made.see(*made.observed.workers, third, missing=(1, 2))
    assert actions(made.plan()) == []
    made.see(*made.observed.workers, missing=(2,))
    assert actions(made.plan()) == [DeleteWorker(index=2, attempt=1, grace_s=5.0)]


def test_all_late_launchers_lose_their_pods(failing: Maker, worker: Maker) -> None:
    """The failure names only the first of them."""
    made = rejoining(failing, worker)
    made.spec(worker_groups=worker_groups(3))
    made.see(*made.observed.workers, sound(worker(2, attempt=1)), missing=(1, 2))
    deleted = [DeleteWorker(index=index, attempt=1, grace_s=5.0) for index in (1, 2)]
    assert actions(made.plan()) == deleted


def test_after_a_preemption_a_launcher_has_the_time_to_save_as_well(running: Maker, worker: Maker) -> None:
    """When that is over it has nothing to save any more."""
    made = running(in_place=True, grace_s=600)
    preempted = dataclasses.replace(worker(1, "Failed", ExitCode.PREEMPTED), disrupted="PreemptionByScheduler")
    made.see(sound(worker(0)), preempted)
    made.plan()
    made.see(sound(worker(0)))
    made.now += 10
    made.plan()
    made.see(sound(worker(0, attempt=1)), sound(worker(1, attempt=1), started_at=1015.0), launcher_attempt=0)
    made.plan()
    made.now += 659
    plan = made.plan()
    assert (actions(plan), plan.status.phase, plan.wake_at) == ([], Phase.RESTARTING, made.now + 1)
    made.now += 1
    assert actions(made.plan()) == [DeleteWorker(index=0, attempt=1, grace_s=5.0)]


@pytest.mark.parametrize(
    ("before", "last"),
    [((0, 1, "RankFailed"), (2, 1, "RankFailed")), ((1, 1, "RankFailed"), (2, 1, "RankKilled")),
     ((1, 0, "RankFailed"), (2, 1, "RankFailed")), ((1, 1, "LostNode"), (1, 0, "RankFailed"))],
    ids=["an attempt between", "another reason", "another worker", "older than the pod"],
)  # fmt: skip
def test_failures_that_do_not_repeat_replace_no_pod(
    running: Maker, worker: Maker, before: tuple[int, int, str], last: tuple[int, int, str]
) -> None:
    made = running(in_place=True)
    failures = tuple(
        Failure(time=990.0, attempt=attempt, worker=index, reason=reason, action=FailureAction.RESTART)
        for attempt, index, reason in (before, last)
    )
    made.status(attempt=3, failures=failures, attempt_time=None, running_time=None, progress=None, last_restart_time=0)
    made.see(*(sound(worker(index, attempt=2)) for index in range(2)))
    assert {type(action) for action in actions(made.plan())} == {RestartWorker}


@pytest.mark.parametrize(("until", "stays"), [(5000.0, False), (900.0, True)], ids=["excluded", "allowed again"])
def test_a_pod_on_an_excluded_node_is_replaced(running: Maker, worker: Maker, until: float, stays: bool) -> None:
    made = running(in_place=True)
    listed = ExcludedNode(node="n1", until=until, reason="SlowNode")
    made.status(attempt=1, excluded_nodes=(listed,), attempt_time=None, running_time=None, progress=None)
    made.see(*(sound(worker(index)) for index in range(2)))
    found = actions(made.plan())
    assert {type(action) for action in found} == {RestartWorker if stays else DeleteWorker}
    assert {action.index for action in found} == ({0, 1} if stays else {1})


def test_a_released_gang_keeps_no_pod(running: Maker, worker: Maker) -> None:
    made = running(in_place=True)
    made.status(attempt=1, released=1, released_time=1000.0, attempt_time=None, running_time=None, progress=None)
    made.see(*(sound(worker(index)) for index in range(2)))
    assert {type(action) for action in actions(made.plan())} == {DeleteWorker}


def test_a_hang_that_returns_replaces_all_pods(running: Maker, worker: Maker) -> None:
    made = running(in_place=True, progress_deadline_s=100)
    for attempt in range(2):
        made.see(*(sound(worker(index, attempt=attempt)) for index in range(2)))
        made.plan()
        made.now += 100
        plan = made.plan()
        assert plan.status.attempt == attempt + 1
        if attempt == 0:
            assert actions(plan) == []
            made.now += 10
            assert {type(action) for action in actions(made.plan())} == {RestartWorker}
    assert {type(action) for action in actions(plan)} == {DeleteWorker}


def test_a_preemption_gives_the_others_time_to_save(running: Maker, worker: Maker) -> None:
    made = running(in_place=True, grace_s=600)
    preempted = dataclasses.replace(worker(1, "Failed", ExitCode.PREEMPTED), disrupted="PreemptionByScheduler")
    made.see(sound(worker(0)), preempted)
    plan = made.plan()
    assert plan.status.failures[-1].action is FailureAction.RESTART_IGNORE_MAX
    made.see(sound(worker(0)))
    made.now += 10
    expected = [RestartWorker(index=0, attempt=1, grace_s=600), CreateWorker(index=1, attempt=1)]
    assert actions(made.plan()) == expected


def test_without_the_policy_all_pods_are_replaced(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(standby(worker(0), ExitCode.PEER_LOST), standby(worker(1), 1))
    assert {type(action) for action in actions(made.plan())} == {DeleteWorker}


def test_an_end_on_record_outlives_the_launcher_that_reported_it(failing: Maker, worker: Maker) -> None:
    """Worker 0 may vanish after it has reported the ends of others."""
    made = failing(max_restarts=0)
    made.spec(policy=dataclasses.replace(made.job.spec.policy, settle_s=5.0))
    made.see(
        sound(worker(0)), dataclasses.replace(made.observed.workers[1], outcome=WorkerOutcome(code=ExitCode.PEER_LOST))
    )
    made.plan()
    assert made.job.status.attempt == 0
    made.see(sound(worker(0)), sound(worker(1)))
    assert [ended.index for ended in made.plan().status.ended] == [1]
