"""The size of a gang: fewer replicas while nodes are missing, more again at a checkpoint, and what it costs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fuzz.history import play
from seen_pods import actions, sound, standby
from worker_groups import worker_groups

from megatronapp_common.job import read_status, status_document
from megatronapp_common.job.api.status import ConditionType, ExcludedNode, FailureAction
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    Backoff,
    CreateWorker,
    DeleteWorker,
    Deletion,
    Elastic,
    ElasticSize,
    EndAtCheckpoint,
    GangSize,
    LeavingNode,
    Phase,
    PodRejection,
    Progress,
    RecordEvent,
    RestartWorker,
    RunPolicy,
    WorkerPhase,
)
from megatronapp_operator.plan.policies.restart import unbudgeted_failures_since
from megatronapp_operator.plan.policies.spares import CHECKED_S

Maker = Callable[..., Any]
PATIENCE_S = 300.0


def spare_at(worker: Maker, seat: int, attempt: int, **changes: Any) -> Any:
    """A spare that waits."""
    named = {"spare": True, "name": f"job-spare-{seat}-{attempt}", "node": f"other{seat}"}
    return dataclasses.replace(sound(worker(seat, attempt=attempt)), **(named | changes))


def events(made: Any, reason: str) -> list[str]:
    return [action.message for action in made.actions if isinstance(action, RecordEvent) and action.reason == reason]


def created(made: Any, *, spare: bool = False) -> list[int]:
    return [action.index for action in made.actions if isinstance(action, CreateWorker) and action.spare is spare]


def sizes(full: int, *smaller: int, gpus: int = 0) -> Elastic:
    groups = tuple(dataclasses.replace(group, gpus_per_node=gpus) for group in worker_groups(full))
    whole = ElasticSize(data=full, worker_groups=groups)
    return Elastic(full=whole, smaller=tuple(map(whole.scaled, smaller)), patience_s=PATIENCE_S)


@pytest.fixture
def lost(plan_harness: Maker, worker: Maker) -> Maker:
    """A gang of four that has trained, and whose attempt 1 has nodes for `placed` workers since the present moment."""

    def make(*smaller: int, placed: int = 3, gpus: int = 0, **policy: Any) -> Any:
        made = plan_harness(in_place=True, start_deadline_s=900, **policy)
        elastic = sizes(4, *smaller, gpus=gpus)
        made.spec(worker_groups=elastic.full.worker_groups, elastic=elastic)
        made.plan()
        made.see(*(sound(worker(index)) for index in range(4)), progress=Progress(attempt=0, iteration=5))
        made.plan()
        seen = [standby(worker(index), ExitCode.PEER_LOST) for index in range(3)]
        removed = dataclasses.replace(worker(3, "Failed", 137), deletion=Deletion(since=made.now, grace_s=0.0))
        made.see(*seen, removed)
        made.plan()
        assert made.job.status.attempt == 1
        made.see(*seen)
        made.now += 40
        made.plan()
        unplaced = [dataclasses.replace(worker(index, "Pending", attempt=1), scheduled=False, unplaced=True)
                    for index in range(placed, 4)]  # fmt: skip
        made.see(*(sound(worker(index, attempt=1)) for index in range(placed)), *unplaced)
        made.plan()
        return made

    return make


@pytest.fixture
def reduced(lost: Maker, worker: Maker) -> Maker:
    """The same once attempt 2 trains with fewer workers."""

    def make(*smaller: int, placed: int = 3, **how: Any) -> Any:
        made = lost(*smaller, placed=placed, **how)
        made.now += PATIENCE_S
        made.plan()
        made.see()
        made.now += 40
        left = len(created(made.plan()))
        seen = [sound(worker(index, attempt=2), started_at=made.now) for index in range(left)]
        made.see(*seen, progress=Progress(attempt=2, iteration=3))
        made.plan()
        assert made.job.status.phase is Phase.RUNNING
        return made

    return make


def test_a_gang_without_a_node_continues_with_fewer_replicas(lost: Maker) -> None:
    made = lost(3, 2)
    made.now += PATIENCE_S - 1
    plan = made.plan()
    assert (actions(plan), plan.wake_at) == ([], made.now + 1)
    made.now += 1
    plan = made.plan()
    assert (plan.status.attempt, plan.status.gang_size) == (2, GangSize(data=3, since_attempt=2))
    message = "1 of 4 workers had no node for 300 s; attempt 2 continues with 3 model replicas, 4 before"
    assert events(plan, "DataParallelReduced") == [message]
    assert {action.index for action in actions(plan) if isinstance(action, DeleteWorker)} == {0, 1, 2, 3}
    assert not [action for action in actions(plan) if isinstance(action, RestartWorker)], "pods know their number"
    condition = plan.status.condition(ConditionType.DATA_PARALLEL_REDUCED)
    assert (condition.status, condition.reason) == (True, "NodesMissing")
    assert (plan.status.restarts, plan.status.released) == (1, 0)
    made.see()
    plan = made.plan()
    assert created(plan) == [0, 1, 2]
    assert plan.status.replicas.desired == 3
    assert read_status(status_document(plan.status)) == plan.status


@pytest.mark.parametrize(
    ("smaller", "placed", "data"), [((3, 2), 2, 2), ((2,), 3, 2), ((3,), 2, None), ((), 3, None)],
    ids=["as many as fit", "an allowed size", "too few nodes", "not asked for"],
)  # fmt: skip
def test_the_largest_allowed_size_that_has_nodes_is_taken(
    lost: Maker, smaller: tuple[int, ...], placed: int, data: int | None
) -> None:
    made = lost(*smaller, placed=placed)
    made.now += PATIENCE_S
    status = made.plan().status
    assert status.gang_size == (None if data is None else GangSize(data=data, since_attempt=2))
    made.now += 900
    assert (made.plan().status.released > 0) is (data is None)


def test_the_first_gang_waits_for_its_full_size(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(in_place=True, start_deadline_s=900)
    elastic = sizes(2, 1)
    made.spec(worker_groups=elastic.full.worker_groups, elastic=elastic)
    made.plan()
    made.see(worker(0, "Pending"), dataclasses.replace(worker(1, "Pending"), scheduled=False, unplaced=True))
    made.plan()
    made.now += 899
    assert made.plan().status.gang_size is None
    made.now += 1
    assert made.plan().status.released == 1


def test_the_gang_gets_smaller_before_all_give_back_their_nodes(lost: Maker) -> None:
    made = lost(3)
    made.spec(elastic=dataclasses.replace(made.job.spec.elastic, patience_s=899))
    made.now = made.job.status.attempt_time + 900
    made.status(unplaced_time=made.now - 890)
    status = made.plan().status
    assert (status.gang_size.data, status.released) == (3, 0)


def test_patience_begins_with_the_loss_of_a_node_also_for_a_gang_that_had_all(lost: Maker, worker: Maker) -> None:
    made = lost(3)
    gang = made.observed.workers
    starting = [dataclasses.replace(known, phase=WorkerPhase.PENDING, unplaced=False, scheduled=True) for known in gang]
    made.see(*starting)
    assert made.plan().status.scheduled_time == made.now
    made.now += 100
    made.see(*starting[:3])
    assert created(made.plan()) == [3]
    made.see(*starting[:3], gang[3])
    assert made.plan().status.gang_size is None
    made.now += PATIENCE_S - 1
    assert made.plan().status.gang_size is None
    made.now += 1
    assert made.plan().status.gang_size == GangSize(data=3, since_attempt=2)


def avoid(made: Any, *nodes: str, reason: str = "SlowNodeDetected") -> None:
    """Let the job avoid nodes."""
    made.status(excluded_nodes=tuple(ExcludedNode(node=n, until=made.now + 9999, reason=reason) for n in nodes))


def test_a_slow_node_is_used_again_before_the_gang_gets_smaller(lost: Maker) -> None:
    made = lost(3)
    avoid(made, "slow")
    made.now += PATIENCE_S - 1
    assert made.plan().status.attempt == 1
    made.now += 1
    plan = made.plan()
    assert [listed.node for listed in plan.status.tolerated_nodes] == ["slow"]
    assert (plan.status.attempt, plan.status.gang_size, plan.status.released) == (2, None, 0)
    assert {action.index for action in actions(plan) if isinstance(action, DeleteWorker)} == {3}, "others stay"
    assert plan.status.condition(ConditionType.PODS_SCHEDULED).message == "1 of 4 workers had no node for 300 s"


def test_a_gang_gets_smaller_in_its_time_though_a_slow_node_is_avoided(lost: Maker, worker: Maker) -> None:
    made = lost(3, 2, placed=2)
    avoid(made, "slow")
    made.now += PATIENCE_S
    status = made.plan().status
    assert (status.attempt, status.gang_size) == (2, GangSize(data=3, since_attempt=2)), "the slow node counts"
    assert (status.excluded_nodes, [listed.node for listed in status.tolerated_nodes]) == ((), ["slow"])
    made.see()
    made.plan()
    absent = dataclasses.replace(worker(2, "Pending", attempt=2), scheduled=False, unplaced=True)
    made.see(*(sound(worker(index, attempt=2)) for index in range(2)), absent)
    made.plan()
    made.now += PATIENCE_S
    assert made.plan().status.gang_size == GangSize(data=2, since_attempt=3), "it was not free"


def test_a_gang_of_its_least_size_uses_a_slow_node_after_its_patience(lost: Maker) -> None:
    made = lost(3, placed=2)
    made.status(gang_size=GangSize(data=3, since_attempt=1))
    made.see(*made.observed.workers[:3])
    avoid(made, "slow")
    made.now += PATIENCE_S
    status = made.plan().status
    assert (status.attempt, status.gang_size.data, len(status.tolerated_nodes)) == (2, 3, 1)


def test_only_as_many_slow_nodes_are_given_back_as_a_size_needs(lost: Maker) -> None:
    made = lost(2, placed=1)
    avoid(made, "slow", "slower")
    made.now += PATIENCE_S
    status = made.plan().status
    assert (status.gang_size.data, len(status.excluded_nodes), len(status.tolerated_nodes)) == (2, 1, 1)
    made = lost(3)
    avoid(made, "broken", reason="RankFailed")
    made.now += PATIENCE_S
    status = made.plan().status
    assert (status.gang_size.data, len(status.excluded_nodes)) == (3, 1), "a failed node is no capacity"


def test_a_full_quota_reduces_the_gang_by_a_size_at_a_time(lost: Maker) -> None:
    made = lost(3, 2, 1)

    def refused(after_s: float = 800.0) -> Any:
        made.now += after_s
        made.see()
        made.plan()
        refusal = PodRejection(attempt=made.job.status.attempt, final=False, reason="QuotaExceeded", message="no quota")
        made.see(refusal=refusal)
        return made.plan()

    plan = refused(after_s=PATIENCE_S)
    assert (plan.status.gang_size, plan.status.released) == (None, 1), "pods may just have gone"
    plan = refused()
    assert (plan.status.gang_size.data, plan.status.released) == (3, 0)
    assert "no quota; attempt" in events(plan, "DataParallelReduced")[0]
    plan = refused()
    assert (plan.status.gang_size.data, plan.status.released) == (3, 1), (
        "the quota may not know yet that pods have gone"
    )
    assert refused().status.gang_size.data == 2


def test_patience_with_a_quota_begins_after_the_pause_of_a_restart(lost: Maker) -> None:
    made = lost(3)
    made.see()
    pause = RunPolicy().backoff.max_s
    made.spec(policy=dataclasses.replace(made.job.spec.policy, backoff=Backoff(initial_s=pause, max_s=pause)))
    refusal = PodRejection(attempt=1, final=False, reason="QuotaExceeded", message="no quota")
    made.status(released=1)
    made.see(refusal=refusal)
    made.now = made.job.status.last_restart_time + pause + PATIENCE_S - 1
    assert (made.plan().status.gang_size, made.job.status.released) == (None, 2)


def test_spares_wait_for_the_absent_workers_and_the_gang_grows_at_its_next_checkpoint(
    reduced: Maker, worker: Maker
) -> None:
    made = reduced(3, 2, placed=2)
    assert made.job.status.gang_size.data == 2
    assert created(made.plan(), spare=True) == [2, 3]
    gang = made.observed.workers
    waits = spare_at(worker, 2, 2)
    starts = spare_at(worker, 3, 2, phase=WorkerPhase.PENDING)
    made.see(*gang, spares=(dataclasses.replace(waits, phase=WorkerPhase.PENDING), starts))
    assert actions(made.plan()) == []
    made.see(*gang, spares=(waits, starts))
    plan = made.plan()
    assert actions(plan) == [EndAtCheckpoint(index=0, attempt=2)]
    text = "2 of 4 model replicas; spares hold nodes for 1 of 2 absent workers; the gang grows to 3 replicas"
    assert events(plan, "GrowsAtCheckpoint") == [f"{text} after its next checkpoint"]
    ordered = (dataclasses.replace(gang[0], ends_at_checkpoint=True), gang[1])
    made.see(*ordered, spares=(waits, starts))
    assert made.plan().actions == ()
    ended = tuple(
        dataclasses.replace(standby(known, ExitCode.PREEMPTED), ends_at_checkpoint=known.index == 0)
        for known in ordered
    )
    made.see(*ended, spares=(waits, starts))
    plan = made.plan()
    status = plan.status
    assert (status.attempt, status.gang_size) == (3, GangSize(data=3, since_attempt=3))
    assert (status.failures[-1].reason, status.restarts_towards_max) == ("DataParallelGrows", 0)
    assert status.restarts == 1, "the node that was lost; changes of the size are none"
    assert {(action.index, action.spare) for action in actions(plan) if isinstance(action, DeleteWorker)} == {
        (0, False), (1, False), (2, True), (3, True),
    }  # fmt: skip
    made.see(spares=())
    assert created(made.plan()) == [0, 1, 2], "without a pause"


def test_the_gang_trains_on_if_a_spare_is_lost_before_the_checkpoint(reduced: Maker, worker: Maker) -> None:
    made = reduced(3)
    gang, spare = made.observed.workers, spare_at(worker, 3, 2)
    made.see(*gang, spares=(spare,))
    made.plan()
    ordered = (dataclasses.replace(gang[0], ends_at_checkpoint=True), *gang[1:])
    made.see(*ordered, spares=(dataclasses.replace(spare, unreachable_since=made.now),))
    plan = made.plan()
    withdrawn = EndAtCheckpoint(index=0, attempt=2, withdrawn=True)
    text = "3 of 4 model replicas; spares hold nodes for 0 of 1 absent worker; the gang trains on"
    assert withdrawn in actions(plan) and events(plan, "GrowthWithdrawn") == [f"{text}, as it cannot grow any more"]
    plan = made.plan()
    assert withdrawn in actions(plan) and not events(plan, "GrowthWithdrawn"), "until the pod shows it"
    made.see(dataclasses.replace(gang[0], end_withdrawn=True), *gang[1:], spares=())
    assert not [action for action in actions(made.plan()) if isinstance(action, EndAtCheckpoint)]
    made.see(*made.observed.workers, spares=(spare,))
    assert actions(made.plan()) == [EndAtCheckpoint(index=0, attempt=2)], "another spare has a node"


def test_an_end_whose_order_was_withdrawn_too_late_is_no_failure(reduced: Maker) -> None:
    made = reduced(3)
    ended = (standby(known, ExitCode.PREEMPTED) for known in made.observed.workers)
    made.see(*(dataclasses.replace(known, end_withdrawn=known.index == 0) for known in ended), spares=())
    status = made.plan().status
    assert (status.failures[-1].reason, status.attempt, status.restarts) == ("DataParallelGrows", 3, 1)


def test_any_restart_has_the_larger_size_if_spares_hold_its_nodes(reduced: Maker, worker: Maker) -> None:
    made = reduced(3)
    gang, spares = made.observed.workers, (spare_at(worker, 3, 2),)
    made.see(*gang, spares=spares)
    made.plan()
    made.see(*(standby(known, 1) for known in gang), spares=spares)
    assert made.plan().status.gang_size == GangSize(data=4, since_attempt=3)


@pytest.mark.parametrize("changes", [{"unreachable_since": 1.0}, {"node": "bad"}], ids=["lost", "excluded"])
def test_a_gang_does_not_grow_onto_nodes_that_it_has_lost(
    reduced: Maker, worker: Maker, changes: dict[str, Any]
) -> None:
    made = reduced(3)
    made.status(excluded_nodes=(ExcludedNode(node="bad", until=made.now + 9999, reason="LostNode"),))
    gang = tuple(standby(known, 1) for known in made.observed.workers)
    made.see(*gang[:2], dataclasses.replace(gang[2], **changes), spares=(spare_at(worker, 3, 2),))
    assert made.plan().status.gang_size.data == 3


def test_a_gang_with_a_node_that_it_leaves_soon_waits_for_as_many_others(reduced: Maker, worker: Maker) -> None:
    made = reduced(3)
    gang, spare = made.observed.workers, spare_at(worker, 3, 2)
    made.see(*gang, spares=(spare,), leaving_nodes=(LeavingNode(name=gang[1].node, reason="is cordoned"),))
    plan = made.plan()
    assert actions(plan) == []
    condition = plan.status.condition(ConditionType.DATA_PARALLEL_REDUCED)
    assert condition.reason == "NodesMissing"
    assert condition.message.endswith(f"for 1 of 1 absent worker; node {gang[1].node} is cordoned and does not count")
    made.see(*gang, leaving_nodes=())
    assert actions(made.plan()) == [EndAtCheckpoint(index=0, attempt=2)]


def test_a_gang_does_not_grow_onto_a_cordoned_node_on_which_a_spare_waits(reduced: Maker, worker: Maker) -> None:
    made = reduced(3)
    gang, spare = made.observed.workers, spare_at(worker, 3, 2)
    made.see(*gang, spares=(spare,), leaving_nodes=(LeavingNode(name=spare.node, reason="is cordoned"),))
    plan = made.plan()
    assert actions(plan) == [], "the spare stays: its pod may tolerate cordoned nodes"
    message = plan.status.condition(ConditionType.DATA_PARALLEL_REDUCED).message
    assert message.endswith(f"for 0 of 1 absent worker; node {spare.node} is cordoned and does not count")
    made.see(*(standby(known, 1) for known in gang))
    assert made.plan().status.gang_size.data == 3, "nor after a failure"


def test_a_spare_is_given_the_time_to_check_its_node_before_the_gang_ends_for_it(reduced: Maker, worker: Maker) -> None:
    made = reduced(3)
    gang, spare = made.observed.workers, spare_at(worker, 3, 2, started_at=made.now)
    made.see(*gang, spares=(spare,))
    plan = made.plan()
    assert (actions(plan), plan.wake_at) == ([], made.now + CHECKED_S)
    made.now += CHECKED_S
    assert actions(made.plan()) == [EndAtCheckpoint(index=0, attempt=2)]


def test_a_gang_that_ended_twice_without_growing_stays_in_its_pods(reduced: Maker, worker: Maker) -> None:
    made = reduced(3)
    for attempt in (2, 3):
        gang = tuple(
            dataclasses.replace(standby(known, ExitCode.PREEMPTED), ends_at_checkpoint=known.index == 0)
            for known in made.observed.workers
        )
        made.see(*gang, spares=())
        plan = made.plan()
        assert plan.status.failures[-1].reason == "DataParallelGrows"
        orders = [action for action in actions(plan) if isinstance(action, RestartWorker)]
        assert [(order.index, order.attempt) for order in orders] == [(index, attempt + 1) for index in range(3)]
        made.now += 60
        made.see(*(sound(worker(index, attempt=attempt + 1), started_at=made.now) for index in range(3)),
                 progress=Progress(attempt=attempt + 1, iteration=3))  # fmt: skip
        made.plan()


def test_an_end_for_growth_makes_the_pause_after_a_failure_no_longer(reduced: Maker) -> None:
    made = reduced(3)
    failure = made.job.status.failures[-1]
    grown = dataclasses.replace(failure, reason="DataParallelGrows", action=FailureAction.RESTART_IGNORE_MAX)
    pauses = []
    for before in ((), (grown,) * 3):
        made.status(failures=(*before, failure))
        pauses.append(unbudgeted_failures_since(made.job.status, failure.time - 3600))
    assert pauses[0] == pauses[1]


def test_the_end_of_a_whole_gang_in_order_is_not_called_growth(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(in_place=True, spares=1)
    made.spec(elastic=sizes(2))
    made.plan()
    made.see(*(sound(worker(index)) for index in range(2)), progress=Progress(attempt=0, iteration=5))
    made.plan()
    ended = (standby(known, ExitCode.PREEMPTED) for known in made.observed.workers)
    made.see(*(dataclasses.replace(known, ends_at_checkpoint=True) for known in ended))
    assert made.plan().status.failures[-1].exit_code == ExitCode.PREEMPTED


def test_the_condition_ends_with_the_full_size(reduced: Maker, worker: Maker) -> None:
    made = reduced(3)
    made.see(*(standby(known, 1) for known in made.observed.workers), spares=(spare_at(worker, 3, 2),))
    made.plan()
    made.see(*(sound(worker(index, attempt=3)) for index in range(4)), spares=())
    condition = made.plan().status.condition(ConditionType.DATA_PARALLEL_REDUCED)
    assert (condition.status, condition.reason, condition.message) == (
        False, "FullSize", "the gang has all 4 model replicas",
    )  # fmt: skip
    assert created(made.plan(), spare=True) == []


def test_a_spare_that_avoids_a_node_which_may_be_used_again_is_replaced(reduced: Maker, worker: Maker) -> None:
    made = reduced(3)
    waiting = spare_at(
        worker, 3, 2, phase=WorkerPhase.PENDING, node=None, scheduled=False, unplaced=True, avoids=frozenset({"bad"})
    )
    made.status(excluded_nodes=(ExcludedNode(node="bad", until=made.now + 60, reason="LostNode"),))
    made.see(*made.observed.workers, spares=(waiting,))
    assert actions(made.plan()) == []
    made.now += 60
    assert [action.index for action in actions(made.plan())] == [3]


def test_a_size_that_an_edit_forbids_ends_with_its_attempt(reduced: Maker) -> None:
    made = reduced(3, 2)
    made.spec(elastic=sizes(4, 2))
    assert made.plan().status.attempt == 2, "the gang trains on"
    made.see(*(standby(known, 1) for known in made.observed.workers))
    plan = made.plan()
    assert plan.status.gang_size == GangSize(data=4, since_attempt=3)
    message = "attempt 3 has 4 model replicas; runPolicy.elastic does not allow 3 any more"
    assert events(plan, "DataParallelGrown") == [message]


def test_a_resumed_job_has_its_full_size(reduced: Maker) -> None:
    made = reduced(3)
    made.spec(suspend=True)
    plan = made.plan()
    assert plan.status.gang_size is None
    assert not plan.status.is_true(ConditionType.DATA_PARALLEL_REDUCED)
    made.see()
    made.plan()
    made.spec(suspend=False)
    assert created(made.plan()) == [0, 1, 2, 3]


def test_the_time_without_workers_is_counted(reduced: Maker) -> None:
    made = reduced(2, placed=2, gpus=8)
    for passed in (59, 1, 30):
        made.now += passed
        spent = made.plan().status.time_spent
    assert (spent.absent, spent.absent_seconds, spent.absent_gpu_seconds) == (2, 120.0, 960.0)
    made.spec(suspend=True)
    spent = made.plan().status.time_spent
    assert (spent.absent, spent.absent_seconds, spent.absent_gpu_seconds) == (0, 180.0, 1440.0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**40), spares=st.integers(0, 2))
def test_sizes_change_between_attempts_alone_in_generated_histories(seed: int, spares: int) -> None:
    """The model refuses a size that is not allowed, a pod that continues in another, and a gang that stays too small
    or never trains with the nodes that are left (`plan_fuzz`).
    """
    play(seed, spares=spares, elastic=True)
