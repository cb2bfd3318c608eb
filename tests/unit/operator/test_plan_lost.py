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
from megatronapp_operator.plan.policies.deadlines import SILENCE_S
from megatronapp_operator.plan.policies.restart import unbudgeted_failures_since

Maker = Callable[..., Any]
UNCOUNTED = FailureAction.RESTART_IGNORE_MAX


def backend_actions(made: Any) -> list[Any]:
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def event_reasons(made: Any) -> list[str]:
    return [action.reason for action in made.actions if isinstance(action, RecordEvent)]


def on(worker: Any, node: str, **changes: Any) -> Any:
    return dataclasses.replace(worker, node=node, **changes)


def last(made: Any) -> tuple[str, str | None, FailureAction]:
    failure = made.status.failures[-1]
    return failure.reason, failure.node, failure.action


@pytest.mark.parametrize("code", [1, 137])
def test_failures_caused_by_a_lost_node_are_not_counted(running: Maker, worker: Maker, code: int) -> None:
    made = running(max_restarts=0)
    made.see(on(worker(0, "Failed", code), "gpu-2"), on(worker(1), "gpu-3", unreachable_since=made.now))
    assert last(made.plan())[2] is UNCOUNTED
    made = running(max_restarts=0)
    made.see(worker(0, "Failed", code), on(worker(1), "gpu-3", disrupted="DeletionByTaintManager"))
    assert last(made.plan())[2] is UNCOUNTED


def test_a_failure_with_a_clear_cause_stays_a_failure_despite_a_lost_node(running: Maker, worker: Maker) -> None:
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


def test_a_silent_peer_after_a_loss_is_on_a_lost_node(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5, silent_s=60, max_restarts=1)
    made.see(on(worker(0, "Failed", ExitCode.PEER_LOST), "gpu-2"), on(worker(1), "gpu-3"))
    made.now += 5
    waiting = made.plan()
    assert (waiting.status.failures, waiting.wake_at) == ((), made.now + 55)
    made.now += 55
    lost = made.plan()
    assert last(lost) == ("LostNode", "gpu-3", FailureAction.EXCLUDE_AND_RESTART)
    assert (lost.status.restarts, lost.status.restarts_towards_max) == (1, 1)
    assert [node.node for node in lost.status.excluded_nodes] == ["gpu-3"]


def test_a_silent_node_that_may_not_be_excluded_is_a_counted_restart(running: Maker, worker: Maker) -> None:
    made = running(silent_s=60, exclusion=NodeExclusion(enabled=False))
    made.see(on(worker(0, "Failed", ExitCode.PEER_LOST), "gpu-2"), on(worker(1), "gpu-3"))
    made.now += 60
    assert last(made.plan()) == ("LostNode", "gpu-3", FailureAction.RESTART)


@pytest.mark.parametrize("nodes", [("a", "b", "c"), ("a", "b", "a")])
def test_no_live_node_is_declared_lost_by_a_single_peer(running: Maker, worker: Maker, nodes: tuple[str, ...]) -> None:
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
def test_a_node_whose_kubelet_refuses_a_worker_is_avoided_and_counted(
    plan_harness: Maker, worker: Maker, reason: str
) -> None:
    made = plan_harness()
    made.plan()
    refused = dataclasses.replace(worker(1, "Failed"), node="gpu-3", outcome=WorkerOutcome(code=1, reason=reason))
    made.see(on(worker(0, "Pending"), "gpu-2"), refused)
    plan = made.plan()
    assert last(plan) == (reason, "gpu-3", FailureAction.EXCLUDE_AND_RESTART)
    assert ([node.node for node in plan.status.excluded_nodes], plan.status.restarts_towards_max) == (["gpu-3"], 1)
    ran = dataclasses.replace(refused, started_at=made.now, finished_at=made.now, attempt=1)
    made.see(worker(0, "Pending", attempt=1), ran)
    assert last(made.plan())[2] is FailureAction.RESTART


def test_the_late_outcome_of_the_culprit_is_awaited_and_judged(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5, silent_s=60)
    victim = on(worker(0, "Failed", ExitCode.PEER_LOST), "gpu-2")
    made.see(victim, on(worker(1), "gpu-3"))
    made.now += 40
    made.plan()
    made.see(victim, on(worker(1, "Failed", ExitCode.DATA), "gpu-3"))
    assert last(made.plan())[2] is FailureAction.FAIL_JOB


def test_a_peer_that_ends_as_a_victim_is_no_lost_node(running: Maker, worker: Maker) -> None:
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


def test_what_is_outside_of_the_budget_is_bounded_by_a_pause_that_grows(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(max_restarts=0, reset_after_s=3600)
    made.plan()
    assert [preempted(made, worker, attempt) for attempt in range(4)] == [10, 20, 40, 40]
    made.now += 7200
    assert preempted(made, worker, 4) == 10
    assert made.job.status.restarts_towards_max == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(FailureAction)), max_size=10), st.floats(0, 100))
def test_only_recent_disruptions_lengthen_the_pause(failures: list[tuple[float, FailureAction]], since: float) -> None:
    failures_seen = tuple(Failure(time=at, attempt=0, reason="", message="", action=action) for at, action in failures)
    expected = len([at for at, action in failures if at > since and action is UNCOUNTED])
    assert unbudgeted_failures_since(Status(failures=failures_seen), since) == expected


def init(phase: str, **others: Any) -> InitPod:
    return InitPod(phase=WorkerPhase(phase), created_at=1000.0, **others)


def initializing(scene: Maker, **policy: Any) -> Any:
    made = scene(**policy)
    made.spec(initializers=True)
    made.plan()
    return made


def test_an_evicted_initializer_is_retried_outside_of_the_budget(plan_harness: Maker) -> None:
    made = initializing(plan_harness, max_restarts=0)
    for pause in (10, 20, 40):
        made.see(init=init("Failed", disrupted="Evicted", message="The node was low on resource: memory."))
        evicted = made.plan()
        assert backend_actions(evicted) == [DeleteInit()] and event_reasons(evicted) == ["Evicted"]
        assert last(evicted) == ("Evicted", None, UNCOUNTED)
        made.see(init=None)
        assert made.plan().wake_at == made.now + pause
        made.now += pause
        assert backend_actions(made.plan()) == [CreateInit()]
    assert made.job.status.init_restarts == 0
    made.see(init=init("Succeeded"))
    assert made.plan().status.initialized


def test_an_initializer_on_a_lost_node_is_removed_by_force(plan_harness: Maker) -> None:
    made = initializing(plan_harness, lost_worker_s=300, max_restarts=0)
    made.see(init=init("Running", unreachable_since=made.now))
    assert made.plan().wake_at == made.now + 300
    made.now += 300
    lost = made.plan()
    assert backend_actions(lost) == [DeleteInit(force=True)] and last(lost)[0] == "LostNode"
    assert lost.status.init_restarts == 0


def test_an_initializer_without_capacity_waits_and_reports_it_once(plan_harness: Maker) -> None:
    made = initializing(plan_harness, start_deadline_s=60, max_restarts=0)
    made.see(init=init("Pending", scheduled=False, message="0/3 nodes are available"))
    made.now += 60
    waiting = made.plan()
    assert (backend_actions(waiting), event_reasons(waiting)) == ([], ["Unschedulable"])
    found = waiting.status.condition(ConditionType.INITIALIZED)
    assert found.reason == "Unschedulable" and "0/3 nodes are available" in found.message
    made.now += 600
    assert made.plan().actions == ()
    made.see(init=init("Pending", begun_at=made.now))
    assert (backend_actions(made.plan()), made.plan().wake_at) == ([], made.now + 60)


def test_what_brings_its_data_has_begun_however_long_that_takes(plan_harness: Maker, worker: Maker) -> None:
    made = initializing(plan_harness, start_deadline_s=60, max_restarts=0)
    made.see(init=init("Pending", preparing=True))
    made.now += 6000
    assert backend_actions(made.plan()) == []
    made = plan_harness(start_deadline_s=60)
    made.plan()
    made.see(worker(0), dataclasses.replace(worker(1, "Pending"), preparing=True))
    made.plan()
    made.now += 6000
    assert made.plan().status.failures == ()
    made.see(worker(0), dataclasses.replace(worker(1, "Pending"), prepared_at=made.now))
    assert made.plan().wake_at == made.now + 60
    made.now += 60
    assert last(made.plan())[0] == "StartDeadlineExceeded"


def test_a_gang_that_is_half_placed_is_released_whatever_its_workers_do(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=60)
    made.plan()
    busy = dataclasses.replace(worker(0, "Pending"), preparing=True)
    made.see(busy, dataclasses.replace(worker(1, "Pending"), scheduled=False))
    made.now += 60
    assert made.plan().status.released == 1


def test_time_without_contact_is_no_lack_of_progress(running: Maker) -> None:
    made = running(progress_deadline_s=20, unheard_s=100, max_restarts=0, grace_s=600)
    made.see(*made.observed.workers, last_contact=made.now + 5)
    made.now += 20
    unknown = made.plan()
    assert (unknown.status.failures, event_reasons(unknown)) == ((), ["ProgressUnknown"])
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
    assert event_reasons(made.plan()) == ["ProgressUnknown"]
    assert event_reasons(made.plan()) == []
    made.see(*made.observed.workers, last_contact=made.now + 1.0, progress=Progress(attempt=0, iteration=9))
    made.now += 1.0
    assert not made.plan().status.is_true(ConditionType.STALLED)


def test_a_gang_reported_hanging_is_restarted(running: Maker) -> None:
    made = running(progress_deadline_s=20)
    made.see(*made.observed.workers, last_contact=made.now + 19)
    made.now += 25
    assert made.plan().status.failures == ()
    made.see(*made.observed.workers, last_contact=made.now)
    assert last(made.plan()) == ("ProgressDeadlineExceeded", None, FailureAction.RESTART)


def test_an_unobserved_gang_is_not_assumed_to_train_without_limit(running: Maker) -> None:
    made = running(progress_deadline_s=20, unheard_s=100, max_restarts=0, grace_s=600)
    made.see(*made.observed.workers, last_contact=0.0)
    made.now += 120
    assert last(made.plan()) == ("ProgressUnknown", None, UNCOUNTED)
    assert [action.grace_s for action in backend_actions(made.plan())] == [600, 600]


@pytest.mark.parametrize("policy", [{}, {"progress_deadline_s": 1800}], ids=["no deadline", "a longer deadline"])
def test_silence_is_reported_with_any_deadline_and_restarts_nothing(running: Maker, policy: dict[str, Any]) -> None:
    made = running(**policy)
    made.see(*made.observed.workers, progress=Progress(attempt=0, iteration=9), last_contact=made.now)
    waits = made.plan()
    assert waits.wake_at == made.now + SILENCE_S
    made.now += SILENCE_S - 1
    assert event_reasons(made.plan()) == []
    made.now += 1
    unknown = made.plan()
    assert (unknown.status.failures, event_reasons(unknown), backend_actions(unknown)) == ((), ["ProgressUnknown"], [])
    assert unknown.status.condition(ConditionType.STALLED).reason == "ProgressUnknown"
    made.now += 15
    assert made.plan().actions == () and made.plan().wake_at <= made.now + 15
    made.see(*made.observed.workers, progress=Progress(attempt=0, iteration=9), last_contact=made.now)
    assert not made.plan().status.is_true(ConditionType.STALLED)


def test_a_gang_without_a_deadline_is_never_restarted_for_silence(running: Maker) -> None:
    made = running()
    made.see(*made.observed.workers, last_contact=0.0)
    made.now += 1e6
    assert (made.plan().status.attempt, made.plan().status.is_true(ConditionType.STALLED)) == (0, True)


def test_an_operator_that_has_just_started_waits_for_an_answer_first(running: Maker) -> None:
    made = running()
    made.now += 5000
    made.see(*made.observed.workers, last_contact=0.0, since=made.now)
    assert event_reasons(made.plan()) == []
    made.now += SILENCE_S
    assert event_reasons(made.plan()) == ["ProgressUnknown"]


def see_hub(made: Any, waiting: str | None, phase: HubPhase = HubPhase.STARTING) -> Any:
    made.observed = dataclasses.replace(made.observed, hub=HubState(phase=phase, waiting=waiting))
    return made.plan()


def test_a_hub_that_does_not_start_is_reported_once_per_reason_and_cleared(running: Maker) -> None:
    made = running()
    made.spec(hub=True)
    assert ConditionType.HUB_READY not in {condition.type for condition in see_hub(made, None).status.conditions}
    first = see_hub(made, "ErrImagePull: no such image")
    assert event_reasons(first) == ["HubNotRunning"] and backend_actions(first) == []
    found = first.status.condition(ConditionType.HUB_READY)
    assert (found.status, found.reason) == (False, "ImagePullBackOff") and "no such image" in found.message
    assert first.status.phase is Phase.RUNNING
    assert see_hub(made, "ImagePullBackOff: Back-off pulling image").actions == ()
    assert see_hub(made, None).actions == ()
    assert event_reasons(see_hub(made, "CrashLoopBackOff: it ended with code 1")) == ["HubNotRunning"]
    ready = see_hub(made, None, HubPhase.READY)
    assert event_reasons(ready) == ["HubRuns"] and ready.status.is_true(ConditionType.HUB_READY)
    assert see_hub(made, None, HubPhase.READY).actions == ()
    assert event_reasons(see_hub(made, "CrashLoopBackOff")) == ["HubNotRunning"]


def test_a_gang_with_pods_on_a_lost_node_is_released_without_a_failure(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=60)
    made.plan()
    made.see(worker(0), on(worker(1, "Pending"), "gpu-3", unreachable_since=made.now))
    made.plan()
    made.now += 60
    assert (made.plan().status.released, made.job.status.failures) == (1, ())


def test_excluded_nodes_are_readmitted_successively_where_no_others_fit(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=60)
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
        seen.append([node.node for node in made.job.status.excluded_nodes])
        made.see()
        made.now = made.plan().wake_at
    assert seen == [["old", "new"], ["new"], [], []]


def test_a_deletion_without_more_is_judged_as_ever(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    made.observed = Observed(secret=True)
    stopping = dataclasses.replace(worker(1), deletion=Deletion(since=made.now, grace_s=30))
    made.see(worker(0, "Failed", 1), stopping, progress=Progress(attempt=0, iteration=1))
    assert last(made.plan())[2] is FailureAction.RESTART


def test_a_restarted_gang_is_not_failed_for_an_unreachable_registry(running: Maker, worker: Maker) -> None:
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


def test_a_gang_with_a_lost_peer_gets_no_time_for_a_checkpoint(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5, silent_s=60, grace_s=600, failed_grace_s=30)
    made.see(on(worker(0, "Failed", ExitCode.PEER_LOST), "gpu-2"), on(worker(1), "gpu-3"))
    made.now += 60
    assert {action.grace_s for action in backend_actions(made.plan())} == {30}
    made = running(grace_s=600, failed_grace_s=30)
    made.see(worker(0, "Failed", ExitCode.PREEMPTED), worker(1))
    made.now += 5
    assert {action.grace_s for action in backend_actions(made.plan())} == {600}


def test_a_gang_whose_time_is_over_may_save(running: Maker) -> None:
    made = running(active_deadline_s=50, grace_s=600, failed_grace_s=30)
    made.now += 50
    assert {action.grace_s for action in backend_actions(made.plan())} == {600}
