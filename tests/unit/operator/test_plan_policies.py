"""Each policy of the plan by itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_common.job import read_status, status_document
from megatronapp_common.job.api.analyzer import SlowRank
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    ConditionType,
    ControlAction,
    CreateWorker,
    DeleteHub,
    DeleteWorker,
    EnsureHub,
    EnsureSecret,
    FailureAction,
    HubPhase,
    HubState,
    Phase,
    Progress,
    RecordEvent,
    StopRequest,
)
from megatronapp_operator.plan.policies.restart import backoff_s
from megatronapp_operator.plan.spec import Backoff

Maker = Callable[..., Any]
SLOW = SlowRank(
    id="v", subject="rank", ranks=(1,), cause="compute", state="confirmed", sentence="Rank 1 is slow.", node="gpu-7"
)


def backend_actions(made: Any) -> list[Any]:
    """Actions other than events."""
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def reasons(made: Any) -> list[str]:
    return [action.reason for action in made.actions if isinstance(action, RecordEvent)]


def test_a_new_job_gets_its_secret_hub_and_whole_gang_at_once(plan_harness: Maker) -> None:
    made = plan_harness()
    made.spec(hub=True)
    made.observed = dataclasses.replace(made.observed, secret=False)
    first = made.plan()
    assert backend_actions(first) == [
        EnsureSecret(),
        EnsureHub(),
        CreateWorker(index=0, attempt=0),
        CreateWorker(index=1, attempt=0),
    ]
    assert first.status.phase is Phase.STARTING
    assert first.status.is_true(ConditionType.CREATED)
    assert first.status.start_time == made.now
    assert reasons(first) == ["GangCreated"], "an Event about the job as well would be a request for nothing"


def test_running_is_when_every_worker_runs_and_the_ranks_train(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.plan()
    made.see(worker(0), worker(1, "Pending"))
    assert made.plan().status.phase is Phase.STARTING
    made.see(worker(0), worker(1))
    made.now += 5
    status = made.plan().status
    assert (status.phase, status.running_time) == (Phase.STARTING, made.now)
    made.see(worker(0), worker(1), progress=Progress(attempt=0, iteration=0, state="starting"))
    assert made.plan().status.phase is Phase.STARTING
    assert not status.is_true(ConditionType.RUNNING)
    made.see(worker(0), worker(1), progress=Progress(attempt=0, iteration=0))
    began = made.plan()
    assert (began.status.phase, reasons(began)) == (Phase.RUNNING, ["Running"])
    assert began.status.is_true(ConditionType.RUNNING)
    made.now += 5
    assert made.plan().actions == ()


def test_a_gang_without_progress_reports_runs_after_a_while(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.plan()
    made.see(worker(0), worker(1))
    assert made.plan().wake_at == made.now + 300
    made.now += 300
    began = made.plan()
    assert (began.status.phase, reasons(began)) == (Phase.RUNNING, ["Running"])
    condition = began.status.condition(ConditionType.RUNNING)
    assert (condition.reason, "no progress was reported for 300 s" in condition.message) == ("NoProgressReported", True)
    made.now += 10
    assert made.plan().actions == ()


@pytest.mark.parametrize(("of", "phase"), [(1, Phase.RESTARTING), (0, Phase.RUNNING)], ids=["this", "older"])
def test_only_a_progress_document_of_this_attempt_means_starting(
    running: Maker, worker: Maker, of: int, phase: Phase
) -> None:
    made = running()
    made.see(worker(0), worker(1, "Failed", 1))
    made.plan()
    page = Progress(attempt=of, iteration=0, state="starting")
    made.see(worker(0, attempt=1), worker(1, attempt=1), progress=page)
    made.now += 10
    assert made.plan().status.phase is Phase.RESTARTING
    made.now += 300
    assert made.plan().status.phase is phase


def test_a_rank_that_hangs_before_the_first_step_is_reported(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.plan()
    made.see(worker(0), worker(1), hung_ranks=(1,))
    made.plan()
    assert (made.job.status.phase, made.job.status.is_true(ConditionType.STALLED)) == (Phase.STARTING, True)


def test_complete_when_all_workers_succeeded(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0, "Succeeded", 0), worker(1))
    assert made.plan().status.phase is Phase.RUNNING
    made.see(worker(0, "Succeeded", 0), worker(1, "Succeeded", 0))
    done = made.plan()
    assert done.status.phase is Phase.SUCCEEDED
    assert done.status.is_true(ConditionType.COMPLETE)
    assert not done.status.is_true(ConditionType.RUNNING)
    assert backend_actions(done) == []


@pytest.mark.parametrize("code", [ExitCode.USAGE, ExitCode.DATA, ExitCode.NOT_FINITE, ExitCode.SUPERSEDED])
def test_a_permanent_error_fails_the_job_once_all_workers_are_deleted(running: Maker, worker: Maker, code: int) -> None:
    made = running()
    made.see(worker(0), worker(1, "Failed", code))
    failing = made.plan()
    assert backend_actions(failing) == [DeleteWorker(index=0, attempt=0, grace_s=made.job.spec.policy.failed_grace_s)]
    assert failing.status.phase is Phase.RUNNING
    assert failing.status.is_true(ConditionType.FAILURE_TARGET)
    assert failing.status.failures[-1].action is FailureAction.FAIL_JOB
    made.see(worker(0, "Failed", ExitCode.PREEMPTED, grace=5.0), worker(1, "Failed", code))
    failed = made.plan()
    assert failed.status.phase is Phase.FAILED
    message = failed.status.condition(ConditionType.FAILED).message
    log = "megatronapp logs job --rank 2 --attempt 0"
    assert message == f"rank 2 on worker 1 failed with exit code {int(code)}: words ({log})"


def test_a_superseded_worker_of_an_older_attempt_changes_nothing(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0), worker(1, "Failed", 1))
    assert made.plan().status.attempt == 1
    made.see(worker(0, "Failed", ExitCode.SUPERSEDED), worker(1, "Failed", 1))
    late = made.plan().status
    assert (late.attempt, late.restarts, late.restarts_towards_max) == (1, 1, 1)
    assert [failure.action for failure in late.failures] == [FailureAction.RESTART]


def test_a_failure_restarts_the_gang_as_a_new_attempt_after_the_back_off(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0), worker(1, "Failed", 1))
    first = made.plan()
    assert first.status.phase is Phase.RESTARTING
    assert (first.status.attempt, first.status.restarts, first.status.restarts_towards_max) == (1, 1, 1)
    assert {type(action) for action in backend_actions(first)} == {DeleteWorker}
    assert {action.index for action in backend_actions(first)} == {0, 1}
    made.see(worker(0, grace=5.0))
    assert backend_actions(made.plan()) == []
    made.see()
    waiting = made.plan()
    assert backend_actions(waiting) == []
    assert waiting.wake_at == made.now + 10
    made.now += 10
    assert backend_actions(made.plan()) == [CreateWorker(index=0, attempt=1), CreateWorker(index=1, attempt=1)]
    made.see(worker(0, attempt=1), worker(1, attempt=1))
    assert made.plan().status.phase is Phase.RESTARTING
    made.observed = dataclasses.replace(made.observed, progress=Progress(attempt=1, iteration=4))
    status = made.plan().status
    assert status.phase is Phase.RUNNING
    assert not status.is_true(ConditionType.RESTARTING)


def test_the_budget_ends_the_job(running: Maker, worker: Maker) -> None:
    made = running(max_restarts=2)
    made.status(restarts=2, restarts_towards_max=2)
    made.see(worker(0), worker(1, "Failed", 1))
    status = made.plan().status
    assert status.condition(ConditionType.FAILURE_TARGET).reason == "BackoffLimitExceeded"
    assert status.attempt == 0


def test_a_preemption_restarts_outside_the_budget_and_leaves_time_for_the_checkpoint(
    running: Maker, worker: Maker
) -> None:
    made = running(max_restarts=0, grace_s=60)
    made.see(worker(0), worker(1, "Failed", ExitCode.PREEMPTED))
    made.now += 5
    first = made.plan()
    assert (first.status.restarts, first.status.restarts_towards_max) == (1, 0)
    assert {action.grace_s for action in backend_actions(first)} == {60}


def test_the_budget_is_whole_again_after_a_long_healthy_run(running: Maker, worker: Maker) -> None:
    made = running(reset_after_s=100)
    made.status(restarts=3, restarts_towards_max=3)
    assert made.plan().wake_at == made.now + 100
    made.now += 99
    assert made.plan().status.restarts_towards_max == 3
    made.now += 1
    status = made.plan().status
    assert (status.restarts, status.restarts_towards_max) == (3, 0)


def test_a_failure_after_a_long_healthy_run_finds_the_budget_whole(running: Maker, worker: Maker) -> None:
    made = running(reset_after_s=100, max_restarts=1)
    made.status(restarts=1, restarts_towards_max=1)
    made.see(worker(0), worker(1, "Failed", 1, made.now + 200))
    made.now += 201
    assert made.plan().status.restarts_towards_max == 1


def test_the_first_own_failure_is_the_evidence_despite_earlier_victims(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(
        worker(0, "Failed", ExitCode.PEER_LOST, made.now - 3),
        worker(1, "Failed", ExitCode.DATA, made.now - 1),
    )
    assert made.plan().status.failures[-1].worker == 1


def test_of_two_own_failures_the_earlier_is_the_evidence(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0, "Failed", 1, made.now - 1), worker(1, "Failed", ExitCode.DATA, made.now - 2))
    assert made.plan().status.failures[-1].worker == 1


def test_a_lost_peer_alone_is_not_judged_before_the_culprit_had_time_to_report(running: Maker, worker: Maker) -> None:
    made = running(settle_s=5)
    made.see(worker(0, "Failed", ExitCode.PEER_LOST), worker(1))
    waiting = made.plan()
    assert waiting.status.failures == ()
    assert waiting.wake_at == made.now + 5
    made.now += 5
    assert made.plan().status.failures[-1].worker == 0


def test_a_worker_that_vanished_after_it_ran_restarts_the_gang(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0))
    status = made.plan().status
    assert status.failures[-1].reason == "WorkerLost"
    assert status.attempt == 1


def test_a_worker_that_vanished_before_it_ran_is_created_again(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.plan()
    made.see(worker(0))
    assert backend_actions(made.plan()) == [CreateWorker(index=1, attempt=0)]


def test_the_active_deadline_fails_the_job(running: Maker) -> None:
    made = running(active_deadline_s=50)
    assert made.plan().wake_at == made.now + 50
    made.now += 50
    failing = made.plan()
    assert failing.status.condition(ConditionType.FAILURE_TARGET).reason == "DeadlineExceeded"
    assert len(backend_actions(failing)) == 2


def test_the_start_deadline_fails_the_job(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(start_deadline_s=30)
    made.plan()
    made.see(worker(0), worker(1, "Pending"))
    assert made.plan().wake_at == made.now + 30
    made.now += 30
    status = made.plan().status
    assert status.condition(ConditionType.FAILURE_TARGET).message == "1 of 2 workers did not start within 30 s"


def test_the_progress_deadline_restarts_and_progress_puts_it_off(running: Maker) -> None:
    made = running(progress_deadline_s=20)
    made.now += 15
    made.observed = dataclasses.replace(made.observed, progress=Progress(attempt=0, iteration=1))
    assert made.plan().wake_at == made.now + 20
    made.now += 20
    status = made.plan().status
    assert status.attempt == 1
    assert status.is_true(ConditionType.STALLED)
    assert status.failures[-1].reason == "ProgressDeadlineExceeded"


def test_progress_of_an_older_attempt_is_not_taken_for_life(running: Maker) -> None:
    made = running(progress_deadline_s=20)
    made.observed = dataclasses.replace(made.observed, progress=Progress(attempt=3, iteration=9))
    assert made.plan().status.progress == Progress(attempt=0, iteration=0)


def test_a_worker_that_outlives_its_grace_is_removed_by_force_once(running: Maker, worker: Maker) -> None:
    made = running(grace_s=60, lost_worker_s=300)
    made.job = dataclasses.replace(made.job, stop=StopRequest(reason="Interrupted", message=""))
    made.see(worker(0, grace=60.0), worker(1, "Failed", 75, grace=60.0))
    assert made.plan().wake_at == made.now + 360
    made.now += 360
    assert backend_actions(made.plan()) == [DeleteWorker(index=0, attempt=0, grace_s=0)]
    made.see(worker(0, grace=0.0), worker(1, "Failed", 75, grace=60.0))
    assert backend_actions(made.plan()) == []


def test_suspending_stops_the_gang_and_resuming_takes_a_new_attempt_outside_the_budget(
    running: Maker, worker: Maker
) -> None:
    made = running(grace_s=60)
    made.spec(suspend=True)
    stopped = made.plan()
    assert {action.grace_s for action in backend_actions(stopped)} == {60}
    assert stopped.status.phase is Phase.SUSPENDED
    made.see(worker(0, grace=60.0))
    made.plan()
    made.spec(suspend=False)
    assert backend_actions(made.plan()) == []
    made.see()
    resumed = made.plan()
    assert backend_actions(resumed) == [CreateWorker(index=0, attempt=1), CreateWorker(index=1, attempt=1)]
    assert (resumed.status.restarts, resumed.status.phase) == (0, Phase.STARTING)
    assert not resumed.status.is_true(ConditionType.SUSPENDED)


def test_deleting_takes_the_hub_and_every_worker(running: Maker, ready_hub: HubState) -> None:
    made = running()
    made.spec(hub=True)
    made.observed = dataclasses.replace(made.observed, hub=ready_hub)
    made.job = dataclasses.replace(made.job, deletion_requested=True)
    assert {type(action) for action in backend_actions(made.plan())} == {DeleteWorker, DeleteHub}


def test_the_terminal_guard_starts_nothing_and_kills_what_still_lives(running: Maker, worker: Maker) -> None:
    made = running()
    made.status(phase=Phase.FAILED, completion_time=made.now)
    made.see(worker(1))
    assert backend_actions(made.plan()) == [DeleteWorker(index=1, attempt=0, grace_s=5)]
    made.see()
    assert backend_actions(made.plan()) == []


def test_the_hub_stays_for_its_time_after_the_end(running: Maker, worker: Maker, ready_hub: HubState) -> None:
    made = running()
    made.spec(hub=True, hub_retain_s=100.0)
    made.see(worker(0, "Succeeded", 0), worker(1, "Succeeded", 0), hub=ready_hub)
    assert made.plan().wake_at == made.now + 100
    made.now += 100
    assert backend_actions(made.plan()) == [DeleteHub()]


def test_a_hub_that_keeps_dying_is_started_less_and_less_often(running: Maker) -> None:
    made = running()
    made.spec(hub=True)
    dead = HubState(phase=HubPhase.ENDED, starts=3, ended_at=made.now)
    made.observed = dataclasses.replace(made.observed, hub=dead)
    assert made.plan().wake_at == made.now + 4
    made.now += 4
    assert backend_actions(made.plan()) == [EnsureHub()]


def test_verdicts_and_hung_ranks_become_conditions_that_are_cleared(running: Maker) -> None:
    made = running()
    made.observed = dataclasses.replace(made.observed, slow_ranks=(SLOW,), hung_ranks=(3,))
    first = made.plan()
    assert first.status.condition(ConditionType.SLOW_NODE_DETECTED).message == "Rank 1 is slow."
    assert first.status.condition(ConditionType.STALLED).message == "no progress of rank 3"
    assert [(node.node, node.ranks) for node in first.status.slow_nodes] == [("gpu-7", (1,))]
    assert reasons(first) == ["SlowNodeDetected", "RankHung"]
    made.observed = dataclasses.replace(made.observed, slow_ranks=(), hung_ranks=())
    second = made.plan()
    assert not second.status.is_true(ConditionType.SLOW_NODE_DETECTED)
    assert (second.status.slow_nodes, second.status.is_true(ConditionType.STALLED)) == ((), False)
    assert reasons(second) == ["SlowNodeCleared"]
    assert reasons(made.plan()) == []


def test_every_verdict_is_reported_once_when_confirmed_and_once_when_cleared(running: Maker) -> None:
    def verdict(name: str, state: str = "confirmed", cause: str = "compute") -> SlowRank:
        return SlowRank(id=name, subject="rank", ranks=(1,), cause=cause, state=state, sentence=f"{name} is slow.")

    made = running()
    history: list[tuple[tuple[SlowRank, ...] | None, list[tuple[str, str]]]] = [
        ((verdict("a"), verdict("b", "suspect")), [("SlowNodeDetected", "a is slow.")]),
        ((verdict("a", "recovering"), verdict("b")), [("SlowNodeDetected", "b is slow.")]),
        (None, []),
        ((verdict("a"), verdict("b"), verdict("h", cause="hang")), []),
        ((verdict("b"),), [("SlowNodeCleared", "no longer: a is slow.")]),
        ((verdict("c"),), [("SlowNodeDetected", "c is slow."), ("SlowNodeCleared", "no longer: b is slow.")]),
        ((), [("SlowNodeCleared", "no longer: c is slow.")]),
        ((), []),
    ]
    for verdicts, expected in history:
        made.observed = dataclasses.replace(made.observed, slow_ranks=verdicts)
        events = [action for action in made.plan().actions if isinstance(action, RecordEvent)]
        assert [(event.reason, event.message) for event in events] == expected


def test_a_hub_without_an_answer_clears_nothing(running: Maker) -> None:
    made = running()
    made.observed = dataclasses.replace(made.observed, slow_ranks=(SLOW,), hung_ranks=(3,))
    made.plan()
    for findings in ((None, None), ((SLOW,), (3,))):
        made.observed = dataclasses.replace(made.observed, slow_ranks=findings[0], hung_ranks=findings[1])
        again = made.plan()
        assert (again.status.slow_ranks, again.status.hung_ranks) == ((SLOW,), (3,))
        assert [node.node for node in again.status.slow_nodes] == ["gpu-7"]
        assert again.status.is_true(ConditionType.SLOW_NODE_DETECTED)
        assert again.status.is_true(ConditionType.STALLED)
        assert reasons(again) == []


@pytest.mark.parametrize("slow_ranks", [None, ()], ids=["hub gone", "hub says all is well"])
def test_the_verdict_stays_after_the_job(
    running: Maker, worker: Maker, slow_ranks: tuple[SlowRank, ...] | None
) -> None:
    made = running()
    made.observed = dataclasses.replace(made.observed, slow_ranks=(SLOW,))
    made.plan()
    made.see(worker(0, "Succeeded", 0), worker(1, "Succeeded", 0))
    made.plan()
    made.observed = dataclasses.replace(made.observed, slow_ranks=slow_ranks, hung_ranks=slow_ranks)
    status = made.plan().status
    assert (status.phase, status.slow_ranks) == (Phase.SUCCEEDED, (SLOW,))
    assert status.is_true(ConditionType.SLOW_NODE_DETECTED)


def test_user_actions_are_reported_once_across_operators_and_after_the_end(running: Maker, worker: Maker) -> None:
    def events_of(*numbers: int) -> list[str]:
        controls = tuple(ControlAction(id=number, text=f"jane did {number}") for number in numbers)
        made.observed = dataclasses.replace(made.observed, controls=controls)
        document = status_document(made.job.status)
        made.job = dataclasses.replace(made.job, status=read_status(document))
        events = [action for action in made.plan().actions if isinstance(action, RecordEvent)]
        return [event.message for event in events if event.reason == "ScopeControl"]

    made = running()
    assert events_of(7, 9) == ["jane did 7", "jane did 9"]
    assert events_of(7, 9) == []
    assert events_of() == []
    assert events_of(9, 12) == ["jane did 12"]
    made.see(worker(0, "Succeeded", 0), worker(1, "Succeeded", 0))
    made.plan()
    assert made.job.status.phase is Phase.SUCCEEDED
    assert events_of(9, 12, 13) == ["jane did 13"]
    assert made.job.status.phase is Phase.SUCCEEDED


def test_hung_ranks_end_with_their_attempt(running: Maker, worker: Maker) -> None:
    made = running()
    made.observed = dataclasses.replace(made.observed, hung_ranks=(3,))
    made.plan()
    made.see(worker(0), worker(1, "Failed", 1), hung_ranks=None)
    made.plan()
    made.see(worker(0, attempt=1), worker(1, attempt=1), progress=Progress(attempt=1, iteration=0))
    made.now += 10
    status = made.plan().status
    assert (status.phase, status.hung_ranks) == (Phase.RUNNING, ())
    assert not status.is_true(ConditionType.STALLED)


def test_a_suspect_is_not_yet_a_slow_node(running: Maker) -> None:
    made = running()
    made.observed = dataclasses.replace(made.observed, slow_ranks=(dataclasses.replace(SLOW, state="suspect"),))
    assert made.plan().status.condition(ConditionType.SLOW_NODE_DETECTED) is None


@pytest.mark.parametrize(("counted", "pause"), [(0, 10), (1, 10), (2, 20), (3, 40), (4, 40), (10_000, 40)])
def test_back_off_grows_to_its_cap(counted: int, pause: float) -> None:
    assert backoff_s(Backoff(initial_s=10, max_s=40, factor=2), counted) == pause


def test_the_time_of_a_condition_moves_only_with_its_status(running: Maker) -> None:
    made = running()
    since = made.job.status.condition(ConditionType.RUNNING).since
    made.now += 100
    made.spec(generation=2)
    condition = made.plan().status.condition(ConditionType.RUNNING)
    assert condition.since == since


def test_the_hub_of_a_suspended_job_is_removed_after_its_retention(
    running: Maker, worker: Maker, ready_hub: HubState
) -> None:
    made = running()
    made.spec(hub=True, hub_retain_s=300, suspend=True)
    made.see(worker(0), worker(1), hub=ready_hub)
    made.plan()
    made.see(hub=ready_hub)
    retained = made.plan()
    assert (backend_actions(retained), retained.wake_at) == ([], made.now + 300)
    made.now += 300
    assert backend_actions(made.plan()) == [DeleteHub()]
    made.see(hub=None)
    assert made.plan().actions == ()
    made.spec(suspend=False)
    assert EnsureHub() in backend_actions(made.plan())
