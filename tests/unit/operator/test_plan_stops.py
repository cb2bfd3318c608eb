"""A job that is asked to stop: what becomes of it, and what is said of those who did not stop in order."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    ConditionType,
    CreateWorker,
    FailureAction,
    Phase,
    RecordEvent,
    StopRequest,
    WorkerOutcome,
)

Maker = Callable[..., Any]
STOP = StopRequest(reason="Interrupted", message="stopped by SIGINT")


def backend_actions(made: Any) -> list[Any]:
    """Actions other than events."""
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def reasons(made: Any) -> list[str]:
    return [action.reason for action in made.actions if isinstance(action, RecordEvent)]


def test_a_stop_leaves_time_for_a_checkpoint_and_a_second_stop_does_not(running: Maker, worker: Maker) -> None:
    made = running(grace_s=60)
    made.job = dataclasses.replace(made.job, stop=STOP)
    assert {action.grace_s for action in backend_actions(made.plan())} == {60}
    made.see(worker(0, grace=60.0), worker(1, grace=60.0))
    assert backend_actions(made.plan()) == []
    made.job = dataclasses.replace(made.job, stop=dataclasses.replace(made.job.stop, force=True))
    assert {action.grace_s for action in backend_actions(made.plan())} == {0}
    made.see(worker(0, "Failed", 1, grace=0.0), worker(1, "Failed", ExitCode.PREEMPTED, grace=0.0))
    status = made.plan().status
    assert status.phase is Phase.FAILED
    assert status.condition(ConditionType.FAILED).reason == "Interrupted"
    assert not status.is_true(ConditionType.SUSPENDED)
    assert status.attempt == 0


def stopped(made: Any, *workers: Any) -> Any:
    """The plan of a job that was asked to stop, and whose workers have ended like this."""
    made.job = dataclasses.replace(made.job, stop=STOP)
    assert reasons(made.plan()) == ["Interrupted"]
    assert made.job.status.phase is Phase.RUNNING
    made.see(*workers)
    return made.plan()


def test_a_stop_with_a_checkpoint_suspends_the_job_and_starts_nothing_again(running: Maker, worker: Maker) -> None:
    made = running()
    saved = (worker(0, "Failed", ExitCode.PREEMPTED, grace=60.0), worker(1, "Failed", ExitCode.PREEMPTED, grace=60.0))
    rested = stopped(made, *saved)
    assert (rested.status.phase, reasons(rested), backend_actions(rested)) == (Phase.SUSPENDED, ["Suspended"], [])
    assert rested.status.condition(ConditionType.SUSPENDED).reason == "Interrupted"
    assert rested.status.condition(ConditionType.FAILED) is None
    assert not rested.status.is_true(ConditionType.RUNNING)
    made.see()
    made.now += 10_000
    later = made.plan()
    assert (later.status.phase, later.actions) == (Phase.SUSPENDED, ())


def test_a_stopped_job_continues_as_a_new_attempt_once_it_is_resumed(running: Maker, worker: Maker) -> None:
    made = running(active_deadline_s=50)
    saved = (worker(0, "Failed", ExitCode.PREEMPTED, grace=60.0), worker(1, "Failed", ExitCode.PREEMPTED, grace=60.0))
    stopped(made, *saved)
    made.see()
    made.now += 10_000
    made.job = dataclasses.replace(made.job, stop=None)
    resumed = made.plan()
    assert backend_actions(resumed) == [CreateWorker(index=0, attempt=1), CreateWorker(index=1, attempt=1)]
    assert (resumed.status.phase, resumed.status.restarts) == (Phase.STARTING, 0)
    assert not resumed.status.is_true(ConditionType.SUSPENDED)


def test_a_stop_after_the_last_step_finds_the_job_complete(running: Maker, worker: Maker) -> None:
    done = stopped(running(), worker(0, "Succeeded", 0, grace=60.0), worker(1, "Succeeded", 0, grace=60.0))
    assert done.status.phase is Phase.SUCCEEDED
    assert done.status.is_true(ConditionType.COMPLETE)
    assert "Interrupted" not in {condition.reason for condition in done.status.conditions}


def test_a_stop_of_a_gang_that_is_not_whole_fails_the_job(running: Maker, worker: Maker) -> None:
    status = stopped(running(), worker(0, "Failed", ExitCode.PREEMPTED, grace=60.0)).status
    assert status.phase is Phase.FAILED
    assert [(failure.reason, failure.worker, failure.action) for failure in status.failures] == [
        ("WorkerLost", 1, FailureAction.FAIL_JOB)
    ]


def test_a_stop_does_not_save_a_job_that_is_failing(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0), worker(1, "Failed", ExitCode.DATA))
    made.plan()
    made.job = dataclasses.replace(made.job, stop=STOP)
    made.see(worker(0, "Failed", ExitCode.PREEMPTED, grace=5.0), worker(1, "Failed", ExitCode.DATA))
    status = made.plan().status
    assert (status.phase, status.condition(ConditionType.FAILED).reason) == (Phase.FAILED, "Because")


def test_a_stop_that_could_not_save_keeps_its_reason(running: Maker, worker: Maker) -> None:
    lost = worker(0, "Failed", ExitCode.PEER_LOST, 1001.0, grace=60.0)
    ended = stopped(running(), lost, worker(1, "Failed", ExitCode.STORAGE, 1002.0, grace=60.0))
    (failure,) = ended.status.failures
    assert (failure.worker, failure.exit_code, failure.action) == (1, ExitCode.STORAGE, FailureAction.FAIL_JOB)
    assert reasons(ended) == ["Because", "Failed"]
    failed = ended.status.condition(ConditionType.FAILED)
    assert (ended.status.phase, failed.reason) == (Phase.FAILED, "Interrupted")
    assert failed.message.startswith("stopped by SIGINT; rank 2 on worker 1 failed with exit code 67: words")


def test_a_worker_that_saved_first_is_not_the_reason_of_a_stop_that_failed(running: Maker, worker: Maker) -> None:
    saved = worker(0, "Failed", ExitCode.PREEMPTED, 1001.0, grace=60.0)
    ended = stopped(running(), saved, worker(1, "Failed", ExitCode.STORAGE, 1002.0, grace=60.0))
    assert [failure.exit_code for failure in ended.status.failures] == [ExitCode.STORAGE]


@pytest.mark.parametrize(
    ("grace", "at", "message"),
    [
        (60.0, 1060.0, "worker 1 was killed: it had not ended 60 s after the request to stop"),
        (0.0, 1000.0, "worker 1 was killed, as requested"),
        (60.0, 1010.0, "worker 1 failed with signal 9: words (megatronapp logs job --worker 1 --attempt 0)"),
    ],
    ids=["grace over", "by force", "by somebody else"],
)
def test_a_killed_worker_is_reported_with_the_signal(
    running: Maker, worker: Maker, grace: float, at: float, message: str
) -> None:
    killed = dataclasses.replace(
        worker(1, "Failed", 1, at, grace=grace),
        outcome=WorkerOutcome(code=1, reason="LauncherKilled", message="words", signal=9),
    )
    (failure,) = stopped(running(), worker(0, "Failed", 75, grace=grace), killed).status.failures
    assert (failure.message, failure.signal) == (message, 9)


def test_a_stop_finds_some_done_and_the_others_saved(running: Maker, worker: Maker) -> None:
    rested = stopped(running(), worker(0, "Succeeded", 0, grace=60.0), worker(1, "Failed", 75, grace=60.0))
    assert (rested.status.phase, rested.status.failures) == (Phase.SUSPENDED, ())


def test_a_stop_between_two_attempts_suspends_the_job(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0), worker(1, "Failed", 1))
    made.plan()
    made.see()
    made.plan()
    made.job = dataclasses.replace(made.job, stop=STOP)
    rested = made.plan()
    assert (rested.status.phase, len(rested.status.failures)) == (Phase.SUSPENDED, 1)
    assert not rested.status.is_true(ConditionType.RESTARTING)
    made.job = dataclasses.replace(made.job, stop=None)
    assert backend_actions(made.plan()) == [CreateWorker(index=0, attempt=1), CreateWorker(index=1, attempt=1)]


def test_a_job_that_is_suspended_at_first_is_acknowledged_before_its_gang_is_created(plan_harness: Maker) -> None:
    made = plan_harness()
    made.spec(suspend=True)
    assert reasons(made.plan())[0] == "JobCreated"
    made.spec(suspend=False)
    assert reasons(made.plan())[-1] == "GangCreated"
