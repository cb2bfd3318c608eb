"""Lost machines, pods that are removed, and events that are never received: none of it is the job's own failure."""

import dataclasses
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_groups import worker_groups

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    ConditionType,
    CreateInit,
    DeleteInit,
    Deletion,
    ExcludedNode,
    Failure,
    FailureAction,
    HubPhase,
    HubState,
    InitPod,
    NodeExclusion,
    Observed,
    Phase,
    Progress,
    RecordEvent,
    Status,
    WorkerOutcome,
    WorkerPhase,
)
from megatronapp_operator.plan.policies.restart import unbudgeted_failures_since

Maker = Callable[..., Any]
UNCOUNTED = FailureAction.RESTART_IGNORE_MAX


def deeds(made: Any) -> list[Any]:
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def told(made: Any) -> list[str]:
    return [action.reason for action in made.actions if isinstance(action, RecordEvent)]


def on(worker: Any, node: str, **changes: Any) -> Any:
    return dataclasses.replace(worker, node=node, **changes)


def last(made: Any) -> tuple[str, str | None, FailureAction]:
    failure = made.status.failures[-1]
    return failure.reason, failure.node, failure.action


@pytest.mark.parametrize("code", [1, 137])
def test_what_dies_of_a_lost_machine_counts_against_nobody(running: Maker, worker: Maker, code: int) -> None:
    made = running(max_restarts=0)
    made.see(on(worker(0, "Failed", code), "gpu-2"), on(worker(1), "gpu-3", unreachable_since=made.now))
    assert last(made.plan())[2] is UNCOUNTED
    made = running(max_restarts=0)
    made.see(worker(0, "Failed", code), on(worker(1), "gpu-3", disrupted="DeletionByTaintManager"))
    assert last(made.plan())[2] is UNCOUNTED


def test_a_failure_that_says_what_it_is_stays_one_beside_a_lost_machine(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0, "Failed", ExitCode.DATA), on(worker(1), "gpu-3", unreachable_since=made.now))
    assert last(made.plan())[2] is FailureAction.FAIL_JOB


def test_who_is_killed_because_it_was_to_go_has_not_failed_by_itself(running: Maker, worker: Maker) -> None:
    made = running(max_restarts=0)
    killed = dataclasses.replace(
        worker(1, "Failed", 137, grace=5.0),
        outcome=WorkerOutcome(code=137, reason="LauncherKilled", signal=signal.SIGKILL),
    )
    made.see(worker(0), killed)
    assert last(made.plan())[2] is UNCOUNTED


def test_a_peer_that_says_nothing_after_it_was_lost_is_on_a_lost_machine(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5, silent_s=60, max_restarts=1)
    made.see(on(worker(0, "Failed", ExitCode.PEER_LOST), "gpu-2"), on(worker(1), "gpu-3"))
    made.now += 5
    waiting = made.plan()
    assert (waiting.status.failures, waiting.wake_at) == ((), made.now + 55)
    made.now += 55
    lost = made.plan()
    assert last(lost) == ("LostNode", "gpu-3", FailureAction.EXCLUDE_AND_RESTART)
    assert (lost.status.restarts, lost.status.restarts_towards_max) == (1, 1)
    assert [one.node for one in lost.status.excluded_nodes] == ["gpu-3"]


def test_where_no_machine_may_be_excluded_a_silent_one_is_a_restart_that_counts(running: Maker, worker: Maker) -> None:
    made = running(silent_s=60, exclusion=NodeExclusion(enabled=False))
    made.see(on(worker(0, "Failed", ExitCode.PEER_LOST), "gpu-2"), on(worker(1), "gpu-3"))
    made.now += 60
    assert last(made.plan()) == ("LostNode", "gpu-3", FailureAction.RESTART)


@pytest.mark.parametrize("nodes", [("a", "b", "c"), ("a", "b", "a")])
def test_no_live_machine_is_called_lost_on_the_word_of_one_peer(
    running: Maker, worker: Maker, nodes: tuple[str, ...]
) -> None:
    made = running(settle_s=5, silent_s=60)
    made.spec(worker_groups=worker_groups(3))
    second = worker(1) if nodes[2] == "c" else worker(1, "Failed", ExitCode.PEER_LOST)
    made.see(on(worker(0, "Failed", ExitCode.PEER_LOST), nodes[0]), on(second, nodes[1]), on(worker(2), nodes[2]))
    made.now += 5
    assert made.plan().status.failures == ()
    made.now += 55
    restarted = made.plan()
    assert last(restarted) == ("Because", "a", FailureAction.RESTART)
    assert restarted.status.excluded_nodes == ()


@pytest.mark.parametrize("reason", ["OutOfcpu", "OutOfnvidia.com/gpu", "UnexpectedAdmissionError"])
def test_a_machine_whose_kubelet_does_not_take_a_worker_is_avoided_and_that_counts(
    scene: Maker, worker: Maker, reason: str
) -> None:
    made = scene()
    made.plan()
    refused = dataclasses.replace(worker(1, "Failed"), node="gpu-3", outcome=WorkerOutcome(code=1, reason=reason))
    made.see(on(worker(0, "Pending"), "gpu-2"), refused)
    plan = made.plan()
    assert last(plan) == (reason, "gpu-3", FailureAction.EXCLUDE_AND_RESTART)
    assert ([one.node for one in plan.status.excluded_nodes], plan.status.restarts_towards_max) == (["gpu-3"], 1)
    ran = dataclasses.replace(refused, started_at=made.now, finished_at=made.now, attempt=1)
    made.see(worker(0, "Pending", attempt=1), ran)
    assert last(made.plan())[2] is FailureAction.RESTART


def test_the_late_word_of_the_culprit_is_waited_for_and_judged(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5, silent_s=60)
    victim = on(worker(0, "Failed", ExitCode.PEER_LOST), "gpu-2")
    made.see(victim, on(worker(1), "gpu-3"))
    made.now += 40
    made.plan()
    made.see(victim, on(worker(1, "Failed", ExitCode.DATA), "gpu-3"))
    assert last(made.plan())[2] is FailureAction.FAIL_JOB


def test_a_peer_that_ends_as_a_victim_too_is_no_lost_machine(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5)
    made.see(on(worker(0, "Failed", ExitCode.PEER_LOST), "a"), on(worker(1, "Failed", ExitCode.PEER_LOST), "b"))
    assert last(made.plan())[2] is FailureAction.RESTART


def preempted(made: Any, worker: Maker, attempt: int) -> float:
    """Preempt the whole gang of this attempt as soon as it trains; the pause that follows."""
    made.see(worker(0, attempt=attempt), worker(1, attempt=attempt), progress=Progress(attempt=attempt, iteration=1))
    made.plan()
    ended = [worker(index, "Failed", ExitCode.PREEMPTED, made.now, attempt=attempt) for index in (0, 1)]
    made.see(*ended)
    made.plan()
    made.see()
    pause = float(made.plan().wake_at - made.now)
    made.now += pause
    made.plan()
    return pause


def test_what_is_outside_of_the_budget_is_bounded_by_a_pause_that_grows(scene: Maker, worker: Maker) -> None:
    made = scene(max_restarts=0, reset_after_s=3600)
    made.plan()
    assert [preempted(made, worker, attempt) for attempt in range(4)] == [10, 20, 40, 40]
    made.now += 7200
    assert preempted(made, worker, 4) == 10
    assert made.job.status.restarts_towards_max == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(FailureAction)), max_size=10), st.floats(0, 100))
def test_only_what_was_taken_away_lately_lengthens_the_pause(
    failures: list[tuple[float, FailureAction]], since: float
) -> None:
    kept = tuple(Failure(time=at, attempt=0, reason="", message="", action=action) for at, action in failures)
    expected = len([at for at, action in failures if at > since and action is UNCOUNTED])
    assert unbudgeted_failures_since(Status(failures=kept), since) == expected


def init(phase: str, **others: Any) -> InitPod:
    return InitPod(phase=WorkerPhase(phase), created_at=1000.0, **others)


def initializing(scene: Maker, **policy: Any) -> Any:
    made = scene(**policy)
    made.spec(initializers=True)
    made.plan()
    return made


def test_an_initializer_that_is_taken_away_is_tried_again_outside_of_the_budget(scene: Maker) -> None:
    made = initializing(scene, max_restarts=0)
    for pause in (10, 20, 40):
        made.see(init=init("Failed", disrupted="Evicted", message="The node was low on resource: memory."))
        away = made.plan()
        assert deeds(away) == [DeleteInit()] and told(away) == ["Evicted"]
        assert last(away) == ("Evicted", None, UNCOUNTED)
        made.see(init=None)
        assert made.plan().wake_at == made.now + pause
        made.now += pause
        assert deeds(made.plan()) == [CreateInit()]
    assert made.job.status.init_restarts == 0
    made.see(init=init("Succeeded"))
    assert made.plan().status.initialized


def test_an_initializer_on_a_lost_machine_is_removed_by_force(scene: Maker) -> None:
    made = initializing(scene, lost_worker_s=300, max_restarts=0)
    made.see(init=init("Running", unreachable_since=made.now))
    assert made.plan().wake_at == made.now + 300
    made.now += 300
    lost = made.plan()
    assert deeds(lost) == [DeleteInit(force=True)] and last(lost)[0] == "LostNode"
    assert lost.status.init_restarts == 0


def test_an_initializer_without_room_waits_and_says_so_once(scene: Maker) -> None:
    made = initializing(scene, start_deadline_s=60, max_restarts=0)
    made.see(init=init("Pending", scheduled=False, message="0/3 nodes are available"))
    made.now += 60
    waiting = made.plan()
    assert (deeds(waiting), told(waiting)) == ([], ["Unschedulable"])
    found = waiting.status.condition(ConditionType.INITIALIZED)
    assert found.reason == "Unschedulable" and "0/3 nodes are available" in found.message
    made.now += 600
    assert made.plan().actions == ()
    made.see(init=init("Pending", begun_at=made.now))
    assert (deeds(made.plan()), made.plan().wake_at) == ([], made.now + 60)


def test_what_brings_its_data_has_begun_however_long_that_takes(scene: Maker, worker: Maker) -> None:
    made = initializing(scene, start_deadline_s=60, max_restarts=0)
    made.see(init=init("Pending", preparing=True))
    made.now += 6000
    assert deeds(made.plan()) == []
    made = scene(start_deadline_s=60)
    made.plan()
    made.see(worker(0), dataclasses.replace(worker(1, "Pending"), preparing=True))
    made.plan()
    made.now += 6000
    assert made.plan().status.failures == ()
    made.see(worker(0), dataclasses.replace(worker(1, "Pending"), prepared_at=made.now))
    assert made.plan().wake_at == made.now + 60
    made.now += 60
    assert last(made.plan())[0] == "StartDeadlineExceeded"


def test_a_gang_that_is_half_placed_is_released_whatever_its_workers_do(scene: Maker, worker: Maker) -> None:
    made = scene(start_deadline_s=60)
    made.plan()
    busy = dataclasses.replace(worker(0, "Pending"), preparing=True)
    made.see(busy, dataclasses.replace(worker(1, "Pending"), scheduled=False))
    made.now += 60
    assert made.plan().status.released == 1


def test_time_in_which_nobody_could_be_asked_is_no_lack_of_progress(running: Maker) -> None:
    made = running(progress_deadline_s=20, unheard_s=100, max_restarts=0, grace_s=600)
    made.see(*made.observed.workers, last_contact=made.now + 5)
    made.now += 20
    unknown = made.plan()
    assert (unknown.status.failures, told(unknown)) == ((), ["ProgressUnknown"])
    assert unknown.status.condition(ConditionType.STALLED).reason == "ProgressUnknown"
    made.now += 10
    again = made.plan()
    assert (again.status, again.actions) == (unknown.status, ())
    assert again.wake_at is not None and again.wake_at <= made.now + 15
    made.see(*made.observed.workers, last_contact=made.now, progress=Progress(attempt=0, iteration=9))
    assert not made.plan().status.is_true(ConditionType.STALLED)


def test_an_answer_from_before_the_deadline_in_its_second_takes_nothing_back(running: Maker) -> None:
    """Check that the warning is not repeated with each reconciliation: conditions know only the second of their
    change."""
    made = running(progress_deadline_s=20, unheard_s=100)
    made.now += 0.5
    made.see(*made.observed.workers, progress=Progress(attempt=0, iteration=1), last_contact=made.now)
    made.plan()
    made.see(*made.observed.workers, last_contact=made.now + 19.9)
    made.now += 20.1
    assert told(made.plan()) == ["ProgressUnknown"]
    assert told(made.plan()) == []
    made.see(*made.observed.workers, last_contact=made.now + 1.0, progress=Progress(attempt=0, iteration=9))
    made.now += 1.0
    assert not made.plan().status.is_true(ConditionType.STALLED)


def test_a_gang_that_is_said_to_stand_still_is_restarted(running: Maker) -> None:
    made = running(progress_deadline_s=20)
    made.see(*made.observed.workers, last_contact=made.now + 19)
    made.now += 25
    assert made.plan().status.failures == ()
    made.see(*made.observed.workers, last_contact=made.now)
    assert last(made.plan()) == ("ProgressDeadlineExceeded", None, FailureAction.RESTART)


def test_nobody_is_believed_to_train_unheard_for_ever(running: Maker) -> None:
    made = running(progress_deadline_s=20, unheard_s=100, max_restarts=0, grace_s=600)
    made.see(*made.observed.workers, last_contact=0.0)
    made.now += 120
    assert last(made.plan()) == ("ProgressUnknown", None, UNCOUNTED)
    assert [one.grace_s for one in deeds(made.plan())] == [600, 600]


def see_hub(made: Any, waiting: str | None, phase: HubPhase = HubPhase.STARTING) -> Any:
    made.observed = dataclasses.replace(made.observed, hub=HubState(phase=phase, waiting=waiting))
    return made.plan()


def test_why_the_hub_does_not_start_is_told_once_for_each_reason_and_taken_back(running: Maker) -> None:
    made = running()
    made.spec(hub=True)
    assert ConditionType.HUB_READY not in {one.type for one in see_hub(made, None).status.conditions}
    first = see_hub(made, "ErrImagePull: no such image")
    assert told(first) == ["HubNotRunning"] and deeds(first) == []
    found = first.status.condition(ConditionType.HUB_READY)
    assert (found.status, found.reason) == (False, "ImagePullBackOff") and "no such image" in found.message
    assert first.status.phase is Phase.RUNNING
    assert see_hub(made, "ImagePullBackOff: Back-off pulling image").actions == ()
    assert see_hub(made, None).actions == ()
    assert told(see_hub(made, "CrashLoopBackOff: it ended with code 1")) == ["HubNotRunning"]
    ready = see_hub(made, None, HubPhase.READY)
    assert told(ready) == ["HubRuns"] and ready.status.is_true(ConditionType.HUB_READY)
    assert see_hub(made, None, HubPhase.READY).actions == ()
    assert told(see_hub(made, "CrashLoopBackOff")) == ["HubNotRunning"]


def test_a_gang_whose_pods_were_on_a_lost_machine_is_released_and_not_blamed(scene: Maker, worker: Maker) -> None:
    made = scene(start_deadline_s=60)
    made.plan()
    made.see(worker(0), on(worker(1, "Pending"), "gpu-3", unreachable_since=made.now))
    made.plan()
    made.now += 60
    assert (made.plan().status.released, made.job.status.failures) == (1, ())


def test_excluded_machines_come_back_one_by_one_where_the_gang_finds_no_others(scene: Maker, worker: Maker) -> None:
    made = scene(start_deadline_s=60)
    nodes = tuple(ExcludedNode(node=name, reason="Slow", until=1e6) for name in ("old", "new"))
    made.status(excluded_nodes=nodes)
    seen = []
    for attempt in range(4):
        made.plan()
        waiting = dataclasses.replace(worker(1, "Pending", attempt=attempt), scheduled=False)
        made.see(worker(0, "Pending", attempt=attempt), waiting)
        made.plan()
        made.now += 60
        made.plan()
        seen.append([one.node for one in made.job.status.excluded_nodes])
        made.see()
        made.now = made.plan().wake_at
    assert seen == [["old", "new"], ["new"], [], []]


def test_a_deletion_without_more_is_judged_as_ever(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    made.observed = Observed(secret=True)
    stopping = dataclasses.replace(worker(1), deletion=Deletion(since=made.now, grace_s=30))
    made.see(worker(0, "Failed", 1), stopping, progress=Progress(attempt=0, iteration=1))
    assert last(made.plan())[2] is FailureAction.RESTART


def test_a_gang_that_has_run_before_is_not_failed_for_a_registry_that_is_away(running: Maker, worker: Maker) -> None:
    made = running(start_deadline_s=60, max_restarts=2)
    made.see(worker(0), worker(1, "Failed", 1))
    made.plan()
    made.see()
    made.now += 10
    made.plan()
    waiting = dataclasses.replace(worker(1, "Pending", attempt=1), waiting="trainer: ErrImagePull")
    made.see(worker(0, attempt=1), waiting)
    made.plan()
    made.now += 60
    assert last(made.plan()) == ("StartDeadlineExceeded", None, FailureAction.RESTART)
    assert made.job.status.restarts_towards_max == 2


def test_who_has_lost_a_peer_gets_no_time_for_a_checkpoint_that_nobody_can_agree_on(
    running: Maker, worker: Maker
) -> None:
    made = running(settle_s=5, silent_s=60, grace_s=600, failed_grace_s=30)
    made.see(on(worker(0, "Failed", ExitCode.PEER_LOST), "gpu-2"), on(worker(1), "gpu-3"))
    made.now += 60
    assert {one.grace_s for one in deeds(made.plan())} == {30}
    made = running(grace_s=600, failed_grace_s=30)
    made.see(worker(0, "Failed", ExitCode.PREEMPTED), worker(1))
    assert {one.grace_s for one in deeds(made.plan())} == {600}


def test_a_gang_whose_time_is_over_may_save(running: Maker) -> None:
    made = running(active_deadline_s=50, grace_s=600, failed_grace_s=30)
    made.now += 50
    assert {one.grace_s for one in deeds(made.plan())} == {600}
