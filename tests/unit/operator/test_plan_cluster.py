"""Policies that matter on a cluster only: placing the gang, initializers, exclusion of machines, cleaning up."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    CleanPodPolicy,
    ConditionType,
    CreateInit,
    CreateWorker,
    DeleteInit,
    DeleteJob,
    DeleteWorker,
    FailureAction,
    InitPod,
    Phase,
    PodRejection,
    RecordEvent,
    SuccessPolicy,
    WorkerPhase,
)
from megatronapp_operator.plan.policies.restart import jitter

Maker = Callable[..., Any]


def backend_actions(made: Any) -> list[Any]:
    """Actions other than events."""
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def reason_of(made: Any, kind: ConditionType) -> tuple[bool, str]:
    found = made.status.condition(kind)
    return found.status, found.reason


def unplaced(worker: Any) -> Any:
    return dataclasses.replace(worker, scheduled=False)


def test_a_gang_without_all_its_nodes_is_released_and_retried_for_free(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=900, max_restarts=0)
    made.plan()
    made.see(worker(0, "Pending"), unplaced(worker(1, "Pending")))
    waiting = made.plan()
    assert reason_of(waiting, ConditionType.PODS_SCHEDULED) == (False, "Scheduling")
    assert waiting.wake_at == made.now + 900
    made.now += 900
    released = made.plan()
    assert backend_actions(released) == [DeleteWorker(index=index, attempt=0, grace_s=0) for index in (0, 1)]
    assert (released.status.phase, released.status.attempt) == (Phase.PENDING, 1)
    assert (released.status.restarts, released.status.restarts_towards_max, released.status.released) == (0, 0, 1)
    assert reason_of(released, ConditionType.PODS_SCHEDULED) == (False, "Unschedulable")
    made.see()
    pause = made.plan().wake_at - made.now
    assert 7.5 <= pause <= 22.5
    made.now += pause
    assert backend_actions(made.plan()) == [CreateWorker(index=index, attempt=1) for index in (0, 1)]
    made.see(worker(0, "Pending", attempt=1), unplaced(worker(1, "Pending", attempt=1)))
    assert reason_of(made.plan(), ConditionType.PODS_SCHEDULED) == (False, "Unschedulable")
    made.see(worker(0, attempt=1), worker(1, attempt=1))
    whole = made.plan()
    assert reason_of(whole, ConditionType.PODS_SCHEDULED) == (True, "AllScheduled")
    assert whole.status.released == 0


@given(st.integers(1, 100_000))
def test_the_retry_delays_of_two_waiting_jobs_differ(attempt: int) -> None:
    assert jitter("one", attempt) == jitter("one", attempt) != jitter("other", attempt)
    assert 0 <= jitter("one", attempt) < 1


def test_the_pause_before_a_released_gang_grows_to_its_cap(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=60)
    pauses = []
    for attempt in range(9):
        made.plan()
        made.see(unplaced(worker(0, "Pending", attempt=attempt)), unplaced(worker(1, "Pending", attempt=attempt)))
        made.plan()
        made.now += 60
        made.plan()
        made.see()
        pauses.append(made.plan().wake_at - made.now)
        made.now += pauses[-1]
    spread = [pause / min(600.0, 15.0 * 2**number) for number, pause in enumerate(pauses)]
    assert all(0.5 <= part < 1.5 for part in spread)
    assert len({round(part, 6) for part in spread}) == len(spread)
    assert made.job.status.phase not in {Phase.FAILED, Phase.SUCCEEDED}


def test_a_quota_in_the_middle_of_the_gang_releases_it_at_once(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.plan()
    refusal = PodRejection(attempt=0, final=False, reason="QuotaExceeded", message="exceeded quota: gpus")
    made.see(worker(0, "Pending"), refusal=refusal)
    released = made.plan()
    assert backend_actions(released) == [DeleteWorker(index=0, attempt=0, grace_s=0)]
    assert reason_of(released, ConditionType.PODS_SCHEDULED) == (False, "QuotaExceeded")
    made.see(refusal=refusal)
    again = made.plan()
    assert (again.status.attempt, backend_actions(again)) == (1, [])


def test_what_can_never_be_accepted_fails_the_job_with_the_reason(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.plan()
    message = "violates PodSecurity restricted: runAsNonRoot"
    made.see(worker(0, "Pending"), refusal=PodRejection(attempt=0, final=True, reason="PodForbidden", message=message))
    made.plan()
    made.see()
    failed = made.plan().status
    assert (failed.phase, failed.condition(ConditionType.FAILED).reason) == (Phase.FAILED, "PodForbidden")
    assert failed.condition(ConditionType.FAILED).message == message
    assert failed.attempt == 0


def denied(attempt: int) -> PodRejection:
    message = 'error looking up service account ns/train: serviceaccount "train" not found'
    return PodRejection(attempt=attempt, final=False, denied=True, reason="PodDenied", message=message)


def deny(made: Any, *, for_s: float) -> None:
    """Refuse every gang as soon as it is asked for, for some time."""
    end = made.now + for_s
    while made.now < end and not made.job.status.is_true(ConditionType.FAILURE_TARGET):
        made.plan()
        made.see(refusal=denied(made.job.status.attempt))
        made.now = made.plan().wake_at or end


def test_pods_that_are_denied_are_tried_until_the_start_deadline(plan_harness: Maker) -> None:
    made = plan_harness(start_deadline_s=900)
    deny(made, for_s=600)
    assert (made.job.status.phase, made.job.status.restarts) == (Phase.PENDING, 0)
    assert made.job.status.condition(ConditionType.PODS_SCHEDULED).reason == "PodDenied"
    deny(made, for_s=3600)
    made.plan()
    failed = made.job.status.condition(ConditionType.FAILED)
    assert (failed.reason, "not found" in failed.message) == ("PodDenied", True)


def test_a_denial_that_passed_does_not_count_later(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=900)
    deny(made, for_s=600)
    made.see()
    made.plan()
    attempt = made.job.status.attempt
    made.see(*(unplaced(worker(index, "Pending", attempt=attempt)) for index in (0, 1)), refusal=None)
    made.plan()
    made.now += 900
    made.plan()
    made.see()
    deny(made, for_s=600)
    assert made.job.status.phase is Phase.PENDING


def test_a_denial_of_the_initializers_does_not_count_against_the_gang(plan_harness: Maker) -> None:
    made = plan_harness(start_deadline_s=900)
    made.spec(initializers=True)
    deny(made, for_s=600)
    assert made.job.status.phase is Phase.PENDING
    made.see(init=init("Running"), refusal=None)
    made.plan()
    made.now += 3600
    made.see(init=init("Succeeded"))
    made.plan()
    deny(made, for_s=600)
    assert made.job.status.phase is Phase.PENDING
    deny(made, for_s=3600)
    made.plan()
    assert made.job.status.condition(ConditionType.FAILED).reason == "PodDenied"


@pytest.mark.parametrize("final", [True, False])
def test_a_job_that_has_trained_waits_for_whatever_is_refused(running: Maker, worker: Maker, final: bool) -> None:
    made = running(max_restarts=100, start_deadline_s=900)
    made.see(worker(0), worker(1, "Failed", 1))
    made.plan()
    made.see()
    for _ in range(20):
        refusal = dataclasses.replace(denied(made.job.status.attempt), final=final, denied=not final)
        made.see(refusal=refusal)
        made.plan()
        made.now += 3600
        assert made.plan().status.phase in {Phase.PENDING, Phase.STARTING}
    assert reason_of(made.plan(), ConditionType.PODS_SCHEDULED) == (False, "PodDenied")
    assert made.job.status.restarts == 1


def test_a_container_that_never_starts_fails_the_job_with_what_it_waits_for(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=900)
    made.plan()
    stuck = dataclasses.replace(worker(1, "Pending"), waiting="ImagePullBackOff: no such image")
    made.now += 600
    made.see(worker(0), stuck)
    assert made.plan().wake_at == made.now + 900
    made.now += 900
    message = made.plan().status.condition(ConditionType.FAILURE_TARGET).message
    assert message == "1 of 2 workers did not start within 900 s; worker 1: ImagePullBackOff: no such image"


def test_a_gang_that_started_once_may_be_late_the_next_time(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=900)
    made.plan()
    made.see(worker(0), worker(1, "Failed", 42))
    made.plan()
    made.see()
    made.now = made.plan().wake_at
    made.plan()
    made.see(worker(0, attempt=1), worker(1, "Pending", attempt=1))
    made.plan()
    made.now += 900
    status = made.plan().status
    assert (status.attempt, status.failures[-1].reason) == (2, "StartDeadlineExceeded")
    assert (status.failures[-1].action, status.restarts_towards_max) == (FailureAction.RESTART, 2)


def test_launchers_that_time_out_while_nodes_are_missing_are_no_failure(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(max_restarts=0)
    made.plan()
    made.see(worker(0, "Failed", ExitCode.RENDEZVOUS), unplaced(worker(1, "Pending")))
    made.plan()
    made.now += 5
    status = made.plan().status
    assert (status.attempt, status.released, status.restarts, status.failures) == (1, 1, 0, ())


def test_a_queue_may_let_the_gang_wait_for_ever_until_it_holds_something(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=60)
    made.spec(gang=True)
    assert made.plan().status.phase is Phase.QUEUED
    made.see(unplaced(worker(0, "Pending")), unplaced(worker(1, "Pending")))
    made.now += 10_000
    waiting = made.plan()
    assert (waiting.status.phase, waiting.status.released, waiting.wake_at) == (Phase.QUEUED, 0, None)
    assert reason_of(waiting, ConditionType.PODS_SCHEDULED) == (False, "Queued")
    made.see(worker(0, "Pending"), unplaced(worker(1, "Pending")))
    assert made.plan().wake_at == made.now + 60
    made.see(worker(0, "Pending"), worker(1, "Pending"))
    assert made.plan().status.phase is Phase.STARTING


def init(phase: str, message: str = "", **others: Any) -> InitPod:
    return InitPod(phase=WorkerPhase(phase), message=message, created_at=1000.0, **others)


def test_initializers_run_once_and_before_the_gang(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.spec(initializers=True)
    assert backend_actions(made.plan()) == [CreateInit()]
    made.see(init=init("Running"))
    running = made.plan()
    assert (backend_actions(running), running.status.phase) == ([], Phase.STARTING)
    assert reason_of(running, ConditionType.INITIALIZED) == (False, "InitializersRunning")
    made.see(init=init("Succeeded"))
    done = made.plan()
    assert backend_actions(done) == [CreateWorker(index=0, attempt=0), CreateWorker(index=1, attempt=0)]
    assert reason_of(done, ConditionType.INITIALIZED) == (True, "InitializersSucceeded")
    made.see(worker(0), worker(1, "Failed", 1), init=None)
    made.plan()
    made.see()
    made.now += 10
    assert backend_actions(made.plan()) == [CreateWorker(index=0, attempt=1), CreateWorker(index=1, attempt=1)]


def test_an_initializer_that_fails_is_tried_again_after_the_back_off_and_then_fails_the_job(
    plan_harness: Maker,
) -> None:
    made = plan_harness(max_restarts=1)
    made.spec(initializers=True)
    made.plan()
    made.see(init=init("Failed", "no such bucket"))
    assert backend_actions(made.plan()) == [DeleteInit()]
    made.see(init=init("Failed", "no such bucket", deleting=True))
    assert (backend_actions(made.plan()), made.job.status.init_restarts) == ([], 1)
    made.see(init=None)
    waiting = made.plan()
    assert (backend_actions(waiting), waiting.wake_at) == ([], made.now + 10)
    made.now += 10
    assert backend_actions(made.plan()) == [CreateInit()]
    made.see(init=init("Failed", "no such bucket"))
    status = made.plan().status
    assert status.phase is Phase.FAILED
    assert status.condition(ConditionType.FAILED).message == "the initializers were started 2 times; no such bucket"


def test_an_initializer_that_cannot_start_is_given_up_after_the_start_deadline(plan_harness: Maker) -> None:
    made = plan_harness(start_deadline_s=60, max_restarts=0)
    made.spec(initializers=True)
    made.plan()
    made.see(init=init("Pending", "ErrImagePull"))
    assert made.plan().wake_at == made.now + 60
    made.now += 60
    assert "did not start within 60 s: ErrImagePull" in made.plan().status.failures[-1].message


@pytest.mark.parametrize("kind", ["suspend", "delete"])
def test_initializers_stop_with_their_job(plan_harness: Maker, kind: str) -> None:
    made = plan_harness()
    made.spec(initializers=True)
    made.plan()
    made.see(init=init("Running"))
    if kind == "suspend":
        made.spec(suspend=True)
    else:
        made.job = dataclasses.replace(made.job, deletion_requested=True)
    assert backend_actions(made.plan()) == [DeleteInit()]


def test_a_worker_on_an_unreachable_node_is_given_up(running: Maker, worker: Maker) -> None:
    made = running(lost_worker_s=300)
    deleted = dataclasses.replace(worker(1, grace=30.0), node="gpu-3")
    made.see(worker(0), deleted)
    assert made.plan().wake_at == made.now + 330
    made.now += 330
    lost = made.plan()
    assert DeleteWorker(index=1, attempt=0, grace_s=0) in backend_actions(lost)
    assert (lost.status.failures[-1].reason, lost.status.failures[-1].node) == ("LostNode", "gpu-3")
    assert (lost.status.restarts, lost.status.restarts_towards_max) == (1, 0)


def test_the_end_of_a_worker_is_known_after_its_pod_has_vanished(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5)
    made.see(worker(0, "Succeeded", 0), worker(1))
    assert made.plan().status.succeeded == (0,)
    made.see(worker(1, "Succeeded", 0))
    assert made.plan().status.phase is Phase.SUCCEEDED


def test_a_deleted_lost_peer_is_judged_by_its_earlier_outcome(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5)
    made.see(worker(0), worker(1, "Failed", ExitCode.PEER_LOST))
    made.plan()
    made.see(worker(0, "Failed", ExitCode.DATA))
    status = made.plan().status
    assert [(failure.worker, failure.action) for failure in status.failures] == [(0, FailureAction.FAIL_JOB)]


def test_victims_of_a_worker_that_vanished_are_not_the_reason(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5, max_restarts=0)
    made.see(worker(0, "Failed", ExitCode.PEER_LOST))
    status = made.plan().status
    assert (status.failures[-1].reason, status.restarts, status.restarts_towards_max) == ("WorkerLost", 1, 0)


def test_the_success_of_worker_0_suffices_where_the_policy_allows(running: Maker, worker: Maker) -> None:
    made = running(grace_s=60, active_deadline_s=30)
    made.spec(success=SuccessPolicy.RANK0)
    made.see(worker(0, "Succeeded", 0), worker(1))
    stopping = made.plan()
    assert backend_actions(stopping) == [DeleteWorker(index=1, attempt=0, grace_s=60)]
    assert stopping.status.phase is Phase.RUNNING
    made.see(worker(1, "Failed", ExitCode.PREEMPTED, grace=60.0))
    made.now += 50
    done = made.plan().status
    assert (done.phase, done.condition(ConditionType.COMPLETE).reason) == (Phase.SUCCEEDED, "Rank0Succeeded")


@pytest.mark.parametrize(
    ("clean", "removed"), [(CleanPodPolicy.NONE, []), (CleanPodPolicy.RUNNING, []), (CleanPodPolicy.ALL, [0, 1])]
)
def test_ended_workers_stay_to_be_read_unless_all_are_to_go(
    running: Maker, worker: Maker, clean: CleanPodPolicy, removed: list[int]
) -> None:
    made = running(clean=clean)
    made.see(worker(0, "Succeeded", 0), worker(1, "Succeeded", 0))
    assert [action.index for action in backend_actions(made.plan())] == removed


@pytest.mark.parametrize(
    ("clean", "removed"), [(CleanPodPolicy.NONE, []), (CleanPodPolicy.RUNNING, [1]), (CleanPodPolicy.ALL, [0, 1])]
)
def test_a_pod_that_only_its_agent_holds_is_removed_unless_the_policy_is_none(
    running: Maker, worker: Maker, clean: CleanPodPolicy, removed: list[int]
) -> None:
    made = running(clean=clean)
    occupying = dataclasses.replace(worker(1, "Succeeded", 0), occupies=True)
    made.see(worker(0, "Succeeded", 0), occupying)
    assert [action.index for action in backend_actions(made.plan())] == removed


def test_the_job_is_deleted_when_its_time_after_the_end_is_over(running: Maker, worker: Maker) -> None:
    made = running(ttl_s=100)
    made.see(worker(0, "Succeeded", 0), worker(1, "Succeeded", 0))
    assert made.plan().wake_at == made.now + 100
    made.now += 100
    assert backend_actions(made.plan()) == [DeleteJob()]
