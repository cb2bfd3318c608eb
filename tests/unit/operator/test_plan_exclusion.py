"""Machines that are slow or have failed: excluded, tolerated, and used again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_operator.plan import (
    ConditionType,
    ExcludedNode,
    FailureAction,
    NodeExclusion,
    Phase,
    Progress,
    RecordEvent,
    SlowNodeAction,
    SlowNodePolicy,
    SlowRank,
)

Maker = Callable[..., Any]


def backend_actions(made: Any) -> list[Any]:
    """Actions other than events."""
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def event_reasons(made: Any) -> list[str]:
    return [action.reason for action in made.actions if isinstance(action, RecordEvent)]


def unplaced(worker: Any) -> Any:
    return dataclasses.replace(worker, scheduled=False)


def slow(**changes: Any) -> SlowRank:
    verdict = SlowRank(
        id="v", subject="rank", ranks=(2,), cause="compute", state="confirmed", sentence="Rank 2 is slow.",
        slowdown=1.5, worker=1, node="gpu-7", since_attempt=0, since_time=1000.0,
    )  # fmt: skip
    return dataclasses.replace(verdict, **changes)


def with_slow_node(made: Any, action: SlowNodeAction, *verdicts: SlowRank) -> Any:
    made.spec(slow_node=SlowNodePolicy(action=action, min_slowdown=1.2, min_s=120))
    made.observed = dataclasses.replace(made.observed, slow_ranks=verdicts)
    return made


def test_a_slow_node_is_excluded_and_the_gang_saves_and_restarts_without_it(running: Maker) -> None:
    made = with_slow_node(running(grace_s=600, max_restarts=0), SlowNodeAction.EXCLUDE_AND_RESTART, slow())
    early = made.plan()
    assert (early.status.slow_node, early.status.excluded_nodes, early.wake_at) == ("gpu-7", (), 1120.0)
    made.now = 1120.0
    restarted = made.plan()
    assert [action.grace_s for action in backend_actions(restarted)] == [600, 600]
    status = restarted.status
    assert status.excluded_nodes == (ExcludedNode(node="gpu-7", reason="SlowNodeDetected", until=1120.0 + 86400),)
    assert (status.phase, status.restarts, status.restarts_towards_max) == (Phase.RESTARTING, 1, 0)
    assert (status.failures[-1].reason, status.failures[-1].node) == ("SlowNodeExcluded", "gpu-7")


def without_capacity(made: Any, worker: Maker, *, placed: int = 1, unplaced_by: str = "scheduler") -> Any:
    """The next gang is created, and one worker of it finds no machine until the start deadline is over."""
    made.see(slow_ranks=())
    while not backend_actions(waiting := made.plan()):
        made.now = waiting.wake_at
    attempt = made.job.status.attempt
    found = [unplaced(worker(index, "Pending", attempt=attempt)) for index in (0, 1)]
    if unplaced_by == "scheduler":
        found = [dataclasses.replace(pending, unplaced=True) for pending in found]
    found[:placed] = [worker(index, "Pending", attempt=attempt) for index in range(placed)]
    made.see(*found)
    made.plan()
    made.now += 900
    return made.plan()


def excluded(made: Any) -> list[str]:
    return [node.node for node in made.job.status.excluded_nodes]


@pytest.mark.parametrize("gang", [False, True])
def test_a_slow_node_is_used_again_where_no_other_is_free(running: Maker, worker: Maker, gang: bool) -> None:
    made = with_slow_node(running(start_deadline_s=900), SlowNodeAction.EXCLUDE_AND_RESTART, slow())
    made.spec(gang=gang)
    made.now = 1120.0
    made.plan()
    released = without_capacity(made, worker, placed=0 if gang else 1)
    assert ("NodeReadmitted" in event_reasons(released), released.status.released, excluded(made)) == (True, 1, [])
    assert [node.node for node in released.status.tolerated_nodes] == ["gpu-7"]
    made.see()
    made.now = made.plan().wake_at
    made.plan()
    attempt = made.job.status.attempt
    again = slow(since_attempt=attempt, since_time=made.now)
    page = Progress(attempt=attempt, iteration=5)
    made.see(worker(0, attempt=attempt), worker(1, attempt=attempt), progress=page, slow_ranks=(again,))
    made.plan()
    made.now += 3600
    made.plan()
    assert (made.job.status.phase, made.job.status.attempt, excluded(made)) == (Phase.RUNNING, attempt, [])
    message = made.job.status.condition(ConditionType.SLOW_NODE_DETECTED).message
    assert message == "Rank 2 is slow. Not excluded, because the gang found no capacity without: gpu-7."
    made.observed = dataclasses.replace(made.observed, slow_ranks=None)  # the hub does not answer
    for _ in range(3):
        assert made.plan().status.condition(ConditionType.SLOW_NODE_DETECTED).message == message
    made.see(*made.observed.workers, slow_ranks=(again,))
    made.now = 1120.0 + 86400
    made.plan()
    assert excluded(made) == ["gpu-7"], "the toleration ends when the exclusion would have"


def test_a_gang_that_no_scheduler_has_seen_retains_its_exclusions(running: Maker, worker: Maker) -> None:
    made = with_slow_node(running(start_deadline_s=900), SlowNodeAction.EXCLUDE_AND_RESTART, slow())
    made.spec(gang=True)
    made.now = 1120.0
    made.plan()
    waiting = without_capacity(made, worker, placed=0, unplaced_by="queue")
    assert (waiting.status.released, excluded(made)) == (0, ["gpu-7"])


@pytest.mark.parametrize("unplaced_by", ["queue", "scheduler"])
def test_an_exclusion_that_ends_costs_no_place_in_a_queue(running: Maker, worker: Maker, unplaced_by: str) -> None:
    """Only a scheduler that finds no machine says that the gang waits for those that it was made to avoid."""
    made = with_slow_node(running(start_deadline_s=900), SlowNodeAction.EXCLUDE_AND_RESTART, slow())
    made.spec(gang=True)
    made.now = 1120.0
    made.plan()
    made.see(slow_ranks=())
    made.now = made.plan().wake_at
    made.plan()
    attempt = made.job.status.attempt
    queued = [dataclasses.replace(worker(index, "Pending", attempt=attempt), scheduled=False) for index in (0, 1)]
    queued = [dataclasses.replace(pending, avoids=frozenset({"gpu-7"})) for pending in queued]
    made.see(*queued)
    made.now = made.plan().wake_at
    assert made.now == 1120.0 + 86400
    made.plan()
    assert (made.job.status.attempt, excluded(made)) == (attempt, []), "the gang keeps its place in the queue"
    if unplaced_by == "queue":
        assert made.plan().wake_at is None
        return
    made.see(*(dataclasses.replace(pending, unplaced=True) for pending in queued))
    assert made.plan().wake_at == made.now + 900, "another gang may be about to leave its machines"
    made.now += 900
    released = made.plan()
    assert (made.job.status.attempt, event_reasons(released)) == (attempt + 1, ["NodeReadmitted"])
    message = released.status.condition(ConditionType.PODS_SCHEDULED).message
    assert message == "2 of 2 workers had no node, and gpu-7 may be used again"


def test_a_gang_without_a_queue_is_recreated_when_an_exclusion_ends(running: Maker, worker: Maker) -> None:
    made = running(start_deadline_s=900)
    made.status(excluded_nodes=(ExcludedNode(node="gpu-1", reason="DeviceFault", until=1100.0),))
    made.see(worker(0), worker(1, "Failed", 1))
    made.plan()
    made.see()
    made.now = made.plan().wake_at
    made.plan()
    avoiding = unplaced(dataclasses.replace(worker(1, "Pending", attempt=1), avoids=frozenset({"gpu-1"})))
    made.see(worker(0, "Pending", attempt=1), avoiding)
    assert made.plan().wake_at == 1100.0
    made.now = 1100.0
    made.plan()
    assert made.job.status.attempt == 1, "no scheduler has said that there is no room"
    made.see(worker(0, "Pending", attempt=1), dataclasses.replace(avoiding, unplaced=True))
    made.plan()
    assert (made.job.status.attempt, made.job.status.released) == (2, 1)


def test_a_queued_gang_gets_a_failed_node_back_where_no_other_fits(running: Maker, worker: Maker) -> None:
    made = running(start_deadline_s=900)
    made.spec(gang=True)
    made.see(worker(0), dataclasses.replace(worker(1, "Failed", 201), node="gpu-2"))
    made.plan()
    assert excluded(made) == ["gpu-2"]
    made.see()
    made.now = made.plan().wake_at
    made.plan()
    queued = [unplaced(worker(index, "Pending", attempt=1)) for index in (0, 1)]
    made.see(*queued)
    made.plan()
    made.now += 3600
    assert (made.plan().status.released, excluded(made)) == (0, ["gpu-2"]), "the queue has no room for it yet"
    made.see(*(dataclasses.replace(pending, unplaced=True, avoids=frozenset({"gpu-2"})) for pending in queued))
    assert made.plan().wake_at == made.now + 1800
    made.now += 1800
    released = made.plan()
    assert (event_reasons(released), excluded(made), released.status.released) == (
        ["NodeReadmitted", "Unschedulable"],
        [],
        1,
    )
    condition = released.status.condition(ConditionType.PODS_SCHEDULED)
    assert condition.message == "2 of 2 workers had no node for 1800 s, so gpu-2 may be used again"
    made.see()
    made.now = made.plan().wake_at
    made.plan()
    made.see(*(dataclasses.replace(unplaced(worker(index, "Pending", attempt=2)), unplaced=True) for index in (0, 1)))
    assert made.plan().wake_at is None, "it avoids nothing any more, so nothing is gained by making it anew"


def test_a_failed_node_is_tolerated_after_a_slow_node(running: Maker, worker: Maker) -> None:
    made = running(start_deadline_s=900)
    broken = ExcludedNode(node="gpu-1", reason="DeviceFault", until=1e9)
    tired = ExcludedNode(node="gpu-2", reason="SlowNodeDetected", until=1e9)
    made.status(excluded_nodes=(broken, tired))
    made.see(worker(0), worker(1, "Failed", 1))
    made.plan()
    without_capacity(made, worker)
    assert excluded(made) == ["gpu-1"]
    without_capacity(made, worker)
    assert (excluded(made), made.job.status.released) == ([], 2)


def test_a_node_that_the_user_allows_is_never_avoided(running: Maker, worker: Maker) -> None:
    made = with_slow_node(running(max_restarts=9), SlowNodeAction.EXCLUDE_AND_RESTART, slow())
    made.now = 1120.0
    made.plan()
    assert excluded(made) == ["gpu-7"]
    policy = dataclasses.replace(made.job.spec.policy, exclusion=NodeExclusion(allowed=frozenset({"gpu-7"})))
    made.spec(policy=policy)
    assert (event_reasons(made.plan()), excluded(made)) == (["NodeReadmitted"], [])
    made.see()
    made.now += 60
    made.plan()
    page = Progress(attempt=1, iteration=5)
    verdict = slow(since_attempt=1)
    broken = dataclasses.replace(worker(1, "Failed", 201, attempt=1), node="gpu-7")
    made.see(worker(0, attempt=1), worker(1, attempt=1), progress=page, slow_ranks=(verdict,))
    assert (made.plan().status.phase, excluded(made)) == (Phase.RUNNING, [])
    made.see(worker(0, attempt=1), broken)
    assert (made.plan().status.failures[-1].action, excluded(made)) == (FailureAction.RESTART, [])


def test_a_slow_node_is_excluded_from_the_next_attempt_only(running: Maker) -> None:
    made = with_slow_node(running(), SlowNodeAction.EXCLUDE, slow())
    made.now = 1120.0
    status = made.plan().status
    assert ([node.node for node in status.excluded_nodes], status.attempt) == (["gpu-7"], 0)
    assert made.plan().actions == ()


@pytest.mark.parametrize(
    "verdict",
    [
        slow(slowdown=1.1),
        slow(state="recovering"),
        slow(cause="undetermined"),
        slow(subject="link", cause="link"),
        slow(since_attempt=5),
        slow(since_time=1100.0),
        slow(node=None),
    ],
    ids=["mild", "recovering", "unknown cause", "link", "other attempt", "short", "nowhere"],
)
def test_only_long_and_severe_slowness_of_a_known_node_excludes(running: Maker, verdict: SlowRank) -> None:
    made = with_slow_node(running(), SlowNodeAction.EXCLUDE_AND_RESTART, verdict)
    made.now = 1120.0
    assert (made.plan().status.excluded_nodes, made.job.status.attempt) == ((), 0)


def test_a_full_list_excludes_no_more_slow_nodes_and_reports_it(running: Maker) -> None:
    made = running(exclusion=NodeExclusion(max_nodes=1))
    made.status(excluded_nodes=(ExcludedNode(node="gpu-1", reason="DeviceFault", until=9000.0),))
    with_slow_node(made, SlowNodeAction.EXCLUDE_AND_RESTART, slow())
    made.now = 1120.0
    status = made.plan().status
    assert ([node.node for node in status.excluded_nodes], status.attempt) == (["gpu-1"], 0)
    message = status.condition(ConditionType.SLOW_NODE_DETECTED).message
    assert message.endswith("runPolicy.nodeExclusion.maxNodes (1) is reached: gpu-7.")
    made.observed = dataclasses.replace(made.observed, slow_ranks=None)  # the hub does not answer
    for _ in range(3):
        assert made.plan().status.condition(ConditionType.SLOW_NODE_DETECTED).message == message
    made.now = 9000.0
    assert [node.node for node in made.plan().status.excluded_nodes] == ["gpu-7"]


def test_a_broken_device_excludes_its_node_in_place_of_the_oldest(running: Maker, worker: Maker) -> None:
    made = running(exclusion=NodeExclusion(max_nodes=1, ttl_s=100))
    made.status(excluded_nodes=(ExcludedNode(node="gpu-1", reason="Old", until=9000.0),))
    made.see(worker(0), dataclasses.replace(worker(1, "Failed", 201), node="gpu-2"))
    status = made.plan().status
    assert status.excluded_nodes == (ExcludedNode(node="gpu-2", reason="Because", until=made.now + 100),)
    assert (status.restarts_towards_max, status.failures[-1].action) == (1, FailureAction.EXCLUDE_AND_RESTART)
    made.now += 100
    assert made.plan().status.excluded_nodes == ()
