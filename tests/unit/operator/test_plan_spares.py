"""Spares: which take a place, when they are created and removed, and how a slow node is swapped at a checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fuzz.history import play
from seen_pods import actions, sound, standby

from megatronapp_common.job import read_status, status_document
from megatronapp_common.job.api.analyzer import SlowRank
from megatronapp_common.job.api.status import (
    ConditionType,
    ExcludedNode,
)
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    CreateWorker,
    DeleteWorker,
    Deletion,
    EndAtCheckpoint,
    FailureAction,
    Phase,
    PodRejection,
    Progress,
    RecordEvent,
    RestartWorker,
    SlowNodeAction,
    SlowNodePolicy,
    Takeover,
    WorkerOutcome,
    WorkerPhase,
)

Maker = Callable[..., Any]


def spare_at(worker: Maker, seat: int = 2, attempt: int = 0, **changes: Any) -> Any:
    """A spare that waits, of a gang of two."""
    made = sound(worker(seat, attempt=attempt))
    return dataclasses.replace(made, **({"spare": True, "name": f"job-spare-{seat - 2}-{attempt}"} | changes))


def events(made: Any, reason: str) -> list[str]:
    return [action.message for action in made.actions if isinstance(action, RecordEvent) and action.reason == reason]


@pytest.fixture
def losing(running: Maker, worker: Maker) -> Maker:
    """A gang with a spare that waits; the pod of worker `lost` is deleted, and removed by the time of the order."""

    def make(lost: int = 1, spares: tuple[Any, ...] | None = None, *, waiting: int = 1) -> Any:
        made = running(in_place=True, spares=waiting)
        spares = tuple(spare_at(worker, 2 + seat) for seat in range(waiting)) if spares is None else spares
        seen = [standby(worker(index), 1 if index == lost else ExitCode.PEER_LOST) for index in range(2)]
        seen[lost] = dataclasses.replace(seen[lost], deletion=Deletion(since=1000.0, grace_s=30.0))
        made.see(*seen, spares=spares)
        made.plan()
        assert made.job.status.attempt == 1
        made.see(*(known for known in seen if known.index != lost), spares=spares)
        made.now += 10
        return made

    return make


def test_spares_are_created_once_the_gang_runs(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(in_place=True, spares=2)
    assert actions(made.plan()) == [CreateWorker(index=index, attempt=0) for index in range(2)]
    made.see(worker(0), worker(1, "Pending"))
    assert actions(made.plan()) == []
    made.see(worker(0), worker(1))
    assert actions(made.plan()) == [CreateWorker(index=index, attempt=0, spare=True) for index in (2, 3)]
    made.see(*made.observed.workers, spares=(spare_at(worker), spare_at(worker, 3, phase=WorkerPhase.PENDING)))
    plan = made.plan()
    assert actions(plan) == []
    condition = plan.status.condition(ConditionType.SPARES_READY)
    assert (condition.status, condition.message) == (False, "1 of 2 spares wait")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_takes_the_place_of_a_lost_worker_and_another_follows_it(
    losing: Maker, worker: Maker, lost: int
) -> None:
    made = losing(lost)
    plan = made.plan()
    stays = RestartWorker(index=1 - lost, attempt=1, grace_s=5.0)
    taking = RestartWorker(index=lost, attempt=1, grace_s=0.0, spare="job-spare-0-0")
    assert actions(plan) == [stays, taking]
    assert plan.status.takeovers == (Takeover(worker=lost, pod="job-spare-0-0"),)
    assert events(plan, "SpareTookOver") == [f"spare job-spare-0-0 on n2 takes the place of worker {lost}"]
    assert read_status(status_document(plan.status)) == plan.status
    seen = [sound(worker(index, attempt=1)) for index in range(2)]
    seen[lost] = dataclasses.replace(seen[lost], name="job-spare-0-0")
    made.see(*seen, spares=())
    made.plan()
    plan = made.plan()
    assert actions(plan) == [CreateWorker(index=2, attempt=1, spare=True)]
    made.see(*seen, spares=(spare_at(worker, attempt=1),), progress=Progress(attempt=1, iteration=3))
    plan = made.plan()
    assert (actions(plan), plan.status.phase) == ([], Phase.RUNNING)
    assert plan.status.takeovers == (Takeover(worker=lost, pod="job-spare-0-0"),)


def test_an_order_to_a_spare_is_repeated_until_it_is_seen(losing: Maker, worker: Maker) -> None:
    made = losing(waiting=2)
    made.plan()
    made.see(sound(worker(0, attempt=1)), spares=(spare_at(worker), spare_at(worker, 3)))
    assert actions(made.plan()) == [RestartWorker(index=1, attempt=1, grace_s=0.0, spare="job-spare-0-0")]


@pytest.mark.parametrize(
    "changes",
    [
        {"deletion": Deletion(since=1000.0, grace_s=30.0)},
        {"disrupted": "Evicted"},
        {"unreachable_since": 990.0},
        {"reusable": False},
        {"phase": WorkerPhase.PENDING},
        {"phase": WorkerPhase.FAILED, "finished_at": 1000.0},
        {"index": 3},
    ],
    ids=["deleted", "disrupted", "unreachable", "edited", "starts", "ended", "fewer spares"],
)
def test_without_a_spare_that_waits_a_new_pod_is_created(losing: Maker, worker: Maker, changes: dict[str, Any]) -> None:
    made = losing(spares=(spare_at(worker, **changes),))
    plan = made.plan()
    assert CreateWorker(index=1, attempt=1) in actions(plan)
    assert events(plan, "NoSpare") == ["no spare is ready for worker 1, which gets a new pod"]
    assert plan.status.takeovers == ()


def test_a_spare_that_is_lost_before_its_order_ends_the_attempt(losing: Maker, worker: Maker) -> None:
    """Worker 0 may have been its place, and the others have its address by then."""
    made = losing(0)
    made.plan()
    made.see(sound(worker(1, attempt=1)), spares=(spare_at(worker, disrupted="Evicted"),))
    plan = made.plan()
    failure = plan.status.failures[-1]
    assert (plan.status.attempt, failure.reason, failure.worker) == (2, "WorkerLost", 0)
    assert failure.action is FailureAction.RESTART_IGNORE_MAX
    made.see(sound(worker(1, attempt=1)), spares=())
    made.now += 40
    plan = made.plan()
    assert actions(plan) == [RestartWorker(index=1, attempt=2, grace_s=30.0), CreateWorker(index=0, attempt=2)]
    assert plan.status.takeovers == ()


def test_a_former_spare_keeps_its_place_in_later_attempts(losing: Maker, worker: Maker) -> None:
    made = losing(0)
    made.plan()
    first = dataclasses.replace(sound(worker(0, attempt=1)), name="job-spare-0-0")
    made.see(first, sound(worker(1, attempt=1)), spares=())
    made.plan()
    ended = [
        dataclasses.replace(standby(worker(index, attempt=1), code), name="job-spare-0-0" if index == 0 else "")
        for index, code in enumerate((ExitCode.PEER_LOST, 1))
    ]
    made.see(*ended, spares=())
    made.plan()
    made.now += 40
    plan = made.plan()
    assert [action.index for action in actions(plan) if isinstance(action, RestartWorker)] == [0, 1]
    assert plan.status.takeovers == (Takeover(worker=0, pod="job-spare-0-0"),)


@pytest.mark.parametrize(
    ("changes", "grace_s"),
    [({"unreachable_since": 990.0}, 5.0), ({"node": "slow"}, 5.0), ({"index": 3}, 5.0)],
    ids=["lost node", "excluded node", "fewer spares"],
)
def test_a_spare_of_no_use_is_removed(running: Maker, worker: Maker, changes: dict[str, Any], grace_s: float) -> None:
    made = running(in_place=True, spares=1)
    made.status(excluded_nodes=(ExcludedNode(node="slow", until=5000.0, reason="SlowNode"),))
    made.see(*made.observed.workers, spares=(spare_at(worker, **changes),))
    assert DeleteWorker(index=changes.get("index", 2), attempt=0, grace_s=grace_s, spare=True) in actions(made.plan())


def test_a_spare_that_ends_is_replaced_after_a_pause(running: Maker, worker: Maker) -> None:
    made = running(in_place=True, spares=1)
    outcome = WorkerOutcome(code=1, reason="PreflightFailed", message="no GPU")
    ended = spare_at(worker, phase=WorkerPhase.FAILED, finished_at=1000.0, outcome=outcome)
    made.see(*made.observed.workers, spares=(ended,))
    plan = made.plan()
    assert (actions(plan), plan.wake_at) == ([], 1060.0)
    assert events(plan, "PreflightFailed") == ["0 of 1 spare waits: job-spare-0-0 has ended: no GPU"]
    assert events(made.plan(), "PreflightFailed") == []
    made.now += 60
    assert actions(made.plan()) == [DeleteWorker(index=2, attempt=0, grace_s=5.0, spare=True)]


def test_a_rejected_spare_does_not_disturb_the_gang(running: Maker) -> None:
    made = running(in_place=True, spares=1)
    refusal = PodRejection(attempt=0, final=True, reason="QuotaExceeded", message="no more pods")
    made.see(*made.observed.workers, refusal=refusal)
    plan = made.plan()
    assert (plan.status.attempt, plan.status.phase) == (0, Phase.RUNNING)
    assert events(plan, "QuotaExceeded") == ["0 of 1 spare waits: no more pods"]


def test_spares_give_their_nodes_to_unplaced_workers(losing: Maker, worker: Maker) -> None:
    made = losing(spares=(spare_at(worker, phase=WorkerPhase.PENDING),))
    made.plan()
    unplaced = dataclasses.replace(worker(1, "Pending", attempt=1), scheduled=False, unplaced=True)
    made.see(sound(worker(0, attempt=1)), unplaced, spares=(spare_at(worker),))
    assert actions(made.plan()) == [DeleteWorker(index=2, attempt=0, grace_s=5.0, spare=True)]


def test_suspension_removes_spares_and_the_end_does(running: Maker, worker: Maker) -> None:
    made = running(in_place=True, spares=1, grace_s=600)
    made.see(*made.observed.workers, spares=(spare_at(worker),))
    assert made.plan().status.is_true(ConditionType.SPARES_READY)
    before = made.job
    made.spec(suspend=True)
    plan = made.plan()
    assert {(action.index, action.spare) for action in actions(plan)} == {(0, False), (1, False), (2, True)}
    assert not plan.status.is_true(ConditionType.SPARES_READY)
    made.job = before
    made.see(*(worker(index, "Succeeded", 0) for index in range(2)), spares=(spare_at(worker),))
    plan = made.plan()
    assert plan.status.phase is Phase.SUCCEEDED
    assert not plan.status.is_true(ConditionType.SPARES_READY)
    assert [action.index for action in actions(plan) if isinstance(action, DeleteWorker) and action.spare] == [2]


def test_a_job_that_is_resumed_lacks_no_spare(running: Maker, worker: Maker) -> None:
    made = running(in_place=True, spares=1)
    made.status(restarts=1)
    made.spec(suspend=True)
    made.plan()
    made.see(spares=())
    made.plan()
    made.spec(suspend=False)
    plan = made.plan()
    assert [action.index for action in actions(plan) if isinstance(action, CreateWorker)] == [0, 1]
    assert events(plan, "NoSpare") == []


@pytest.mark.parametrize("gpus", [0, 8])
def test_the_time_of_spares_is_counted(running: Maker, worker: Maker, gpus: int) -> None:
    made = running(in_place=True, spares=1)
    groups = tuple(dataclasses.replace(group, gpus_per_node=gpus) for group in made.job.spec.worker_groups)
    made.spec(worker_groups=groups)
    made.see(*made.observed.workers, spares=(spare_at(worker),))
    made.plan()
    for passed in (59, 1, 30):
        made.now += passed
        spent = made.plan().status.time_spent
    assert (spent.spares, spent.spare_seconds, spent.spare_gpu_seconds) == (1, 60.0, 60.0 * gpus)
    made.see(*made.observed.workers, spares=())
    spent = made.plan().status.time_spent
    assert (spent.spares, spent.spare_seconds, spent.spare_gpu_seconds) == (0, 90.0, 90.0 * gpus)
    made.now += 500
    assert made.plan().status.time_spent.spare_seconds == 90.0


def test_a_slow_node_is_swapped_at_the_next_checkpoint(running: Maker, worker: Maker) -> None:
    made = running(in_place=True, spares=1)
    made.spec(slow_node=SlowNodePolicy(action=SlowNodeAction.SWAP_AT_CHECKPOINT, min_s=30))
    verdict = SlowRank(
        id="v", subject="node", cause="compute", state="confirmed", sentence="n1 is slow", slowdown=1.5, node="n1",
        since_attempt=0, since_time=900.0,
    )  # fmt: skip
    gang, waiting = [sound(worker(index)) for index in range(2)], (spare_at(worker),)
    made.see(*gang, spares=waiting, slow_ranks=(verdict,))
    plan = made.plan()
    assert actions(plan) == [EndAtCheckpoint(index=0, attempt=0)]
    assert (plan.status.attempt, [listed.node for listed in plan.status.excluded_nodes]) == (0, ["n1"])
    waits = "The gang ends with its next checkpoint; then a spare takes the place of worker 1, which leaves n1."
    assert events(plan, "SwapWaits") == [waits]
    condition = plan.status.condition(ConditionType.SLOW_NODE_DETECTED)
    assert condition.message == f"n1 is slow {waits}"
    again = made.plan()
    assert actions(again) == [EndAtCheckpoint(index=0, attempt=0)], "until the pod shows it"
    assert events(again, "SwapWaits") == []
    gang[0] = dataclasses.replace(gang[0], ends_at_checkpoint=True)
    made.see(*gang, spares=waiting)
    made.now += 100
    assert actions(made.plan()) == [], "the gang trains on until then"
    made.see(*(standby(worker(index), ExitCode.PREEMPTED, "Preempted") for index in range(2)), spares=waiting)
    plan = made.plan()
    failure = plan.status.failures[-1]
    assert (failure.reason, failure.worker, failure.node) == ("SlowNodeSwapped", 1, "n1")
    assert (plan.status.restarts, plan.status.restarts_towards_max) == (1, 0)
    assert [action for action in actions(plan) if isinstance(action, DeleteWorker)] == [
        DeleteWorker(index=1, attempt=0, grace_s=30.0)
    ]
    made.see(made.observed.workers[0], spares=waiting)
    plan = made.plan()
    orders = [action for action in actions(plan) if isinstance(action, RestartWorker)]
    assert [(order.index, order.spare) for order in orders] == [(0, None), (1, "job-spare-0-0")], "without a pause"


@pytest.mark.parametrize(
    "changes",
    [{"phase": WorkerPhase.PENDING}, {"reusable": False}, {"disrupted": "Evicted"}, {"node": "n1"}],
    ids=["starts", "edited", "disrupted", "slow node"],
)
def test_a_slow_node_is_not_left_before_a_spare_waits(running: Maker, worker: Maker, changes: dict[str, Any]) -> None:
    made = running(in_place=True, spares=1)
    made.spec(slow_node=SlowNodePolicy(action=SlowNodeAction.SWAP_AT_CHECKPOINT))
    gang = [sound(worker(index)) for index in range(2)]
    verdict = SlowRank(
        id="v", subject="node", cause="compute", state="confirmed", sentence="n1 is slow.", slowdown=1.5, node="n1",
        since_attempt=0, since_time=800.0,
    )  # fmt: skip
    made.see(*gang, spares=(spare_at(worker, **changes),), slow_ranks=(verdict,))
    plan = made.plan()
    assert not [action for action in actions(plan) if isinstance(action, EndAtCheckpoint)]
    assert events(plan, "SwapWaits") == ["Worker 1 stays on n1 until a spare waits on another node."]
    made.see(*gang, spares=(spare_at(worker),))
    plan = made.plan()
    assert actions(plan) == [EndAtCheckpoint(index=0, attempt=0)]
    assert (
        " takes the place of worker 1, which leaves n1."
        in plan.status.condition(ConditionType.SLOW_NODE_DETECTED).message
    )


@pytest.mark.parametrize("reason", ["no spare", "allowed"])
def test_a_gang_trains_on_if_a_swap_has_lost_its_reason(running: Maker, worker: Maker, reason: str) -> None:
    made = running(in_place=True, spares=1)
    made.spec(slow_node=SlowNodePolicy(action=SlowNodeAction.SWAP_AT_CHECKPOINT))
    made.status(excluded_nodes=(ExcludedNode(node="n1", until=5000.0, reason="SlowNodeDetected"),))
    gang = [dataclasses.replace(sound(worker(index)), ends_at_checkpoint=index == 0) for index in range(2)]
    made.see(*gang, spares=(spare_at(worker),))
    assert actions(made.plan()) == []
    if reason == "allowed":
        made.status(excluded_nodes=())
    made.see(*gang, spares=(spare_at(worker, disrupted="Evicted" if reason == "no spare" else None),))
    orders = [action for action in actions(made.plan()) if isinstance(action, EndAtCheckpoint)]
    assert orders == [EndAtCheckpoint(index=0, attempt=0, withdrawn=True)]


@pytest.mark.parametrize("code", [1, ExitCode.PREEMPTED])
def test_an_end_for_another_reason_is_no_swap(running: Maker, worker: Maker, code: int) -> None:
    made = running(in_place=True, spares=1)
    if code != ExitCode.PREEMPTED:
        made.spec(slow_node=SlowNodePolicy(action=SlowNodeAction.SWAP_AT_CHECKPOINT))
    made.status(excluded_nodes=(ExcludedNode(node="n1", until=5000.0, reason="SlowNodeDetected"),))
    made.see(*(standby(worker(index), code) for index in range(2)), spares=(spare_at(worker),))
    assert made.plan().status.failures[-1].reason == "RankFailed"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**40), spares=st.integers(1, 3))
def test_no_place_is_lost_or_taken_twice_in_generated_histories(seed: int, spares: int) -> None:
    """The model refuses two workers at one place, and a job that trains without its spares (`plan_fuzz`)."""
    play(seed, spares=spares)
