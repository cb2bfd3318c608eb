"""Failure rules: what the first failed worker leads to, by the user's rules and then by our own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_groups import worker_groups

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    Deletion,
    FailureAction,
    FailureMatch,
    FailureRule,
    NodeExclusion,
    Phase,
    Progress,
    WorkerOutcome,
)
from megatronapp_operator.plan.failure_rules import FailureEvidence, matches_rule, matching_user_action

Maker = Callable[..., Any]
FOUND = FailureEvidence(worker=3, reason="RankFailed", message="rank 6: CUDA error: Xid 79", code=137, signal=9)


@pytest.mark.parametrize(
    ("match", "yes"),
    [
        (FailureMatch(), True),
        (FailureMatch(exit_codes=(1, 137)), True),
        (FailureMatch(exit_codes=(1,)), False),
        (FailureMatch(not_exit_codes=(1,)), True),
        (FailureMatch(not_exit_codes=(137,)), False),
        (FailureMatch(signals=(9,)), True),
        (FailureMatch(signals=(15,)), False),
        (FailureMatch(reasons=("OOMKilled", "RankFailed")), True),
        (FailureMatch(reasons=("OOMKilled",)), False),
        (FailureMatch(message_regex="Xid [0-9]+$"), True),
        (FailureMatch(message_regex="^CUDA"), False),
        (FailureMatch(message_regex="("), False),
        (FailureMatch(condition_types=("DisruptionTarget",)), False),
        (FailureMatch(workers=(3,)), True),
        (FailureMatch(workers=(0,)), False),
        (FailureMatch(exit_codes=(137,), workers=(0,)), False),
    ],
    ids=str,
)
def test_a_rule_fits_where_all_that_it_asks_holds(match: FailureMatch, yes: bool) -> None:
    assert matches_rule(match, FOUND) is yes


def test_an_evicted_worker_matches_its_condition_and_reason() -> None:
    evicted = dataclasses.replace(FOUND, disrupted="Evicted")
    assert matches_rule(FailureMatch(condition_types=("DisruptionTarget",), reasons=("Evicted",)), evicted)
    assert matches_rule(FailureMatch(condition_types=("TerminationTarget",)), evicted)
    assert not matches_rule(FailureMatch(condition_types=("Ready",)), evicted)


@pytest.mark.parametrize("match", [FailureMatch(exit_codes=(0,)), FailureMatch(not_exit_codes=(1,))])
def test_without_an_exit_code_no_rule_about_codes_fits(match: FailureMatch) -> None:
    assert not matches_rule(match, dataclasses.replace(FOUND, code=None))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(FailureAction)), max_size=6))
def test_the_first_rule_that_fits_decides(rules: list[tuple[bool, FailureAction]]) -> None:
    made = tuple(FailureRule(match=FailureMatch(workers=(3,) if fit else (4,)), action=action) for fit, action in rules)
    assert matching_user_action(made, FOUND) == next((action for fit, action in rules if fit), None)


def judged(made: Any) -> tuple[FailureAction, int]:
    """Return the action on the first failure, and how much of the budget it took."""
    status = made.plan().status
    return status.failures[-1].action, status.restarts_towards_max


def ended(worker: Any, **changes: Any) -> Any:
    return dataclasses.replace(worker, **changes)


def test_rules_of_the_user_precede_the_built_in_rules(running: Maker, worker: Maker) -> None:
    rule = FailureRule(match=FailureMatch(exit_codes=(ExitCode.DATA,)), action=FailureAction.RESTART_IGNORE_MAX)
    made = running(rules=(rule,))
    made.see(worker(0), worker(1, "Failed", ExitCode.DATA))
    assert judged(made) == (FailureAction.RESTART_IGNORE_MAX, 0)


def test_an_ignored_worker_is_treated_as_succeeded(running: Maker, worker: Maker) -> None:
    made = running(rules=(FailureRule(match=FailureMatch(workers=(1,)), action=FailureAction.IGNORE),))
    made.see(worker(0), worker(1, "Failed", 1))
    going = made.plan().status
    assert (going.phase, going.succeeded, going.failures) == (Phase.RUNNING, (1,), ())
    made.see(worker(0, "Succeeded", 0))
    assert made.plan().status.phase is Phase.SUCCEEDED


def test_an_exclusion_without_a_list_or_a_node_is_a_restart(running: Maker, worker: Maker) -> None:
    made = running(exclusion=NodeExclusion(enabled=False))
    made.see(worker(0), ended(worker(1, "Failed", 201), node="gpu-1"))
    assert judged(made) == (FailureAction.RESTART, 1)
    made = running()
    made.see(worker(0), worker(1, "Failed", 202))
    assert judged(made) == (FailureAction.RESTART, 1)


@pytest.mark.parametrize("code", [137, 1, ExitCode.DATA])
def test_an_eviction_is_a_preemption_whatever_its_exit_code(running: Maker, worker: Maker, code: int) -> None:
    made = running(max_restarts=0)
    made.see(worker(0), ended(worker(1, "Failed", code), disrupted="Evicted"))
    assert judged(made) == (FailureAction.RESTART_IGNORE_MAX, 0)
    assert made.job.status.failures[-1].reason == "Evicted"


@pytest.mark.parametrize(("code", "signal"), [(1, None), (143, 15), (137, 9), (ExitCode.PREEMPTED, None)])
def test_a_worker_that_another_deletes_is_preempted_whatever_it_ends_with(
    running: Maker, worker: Maker, code: int, signal: int | None
) -> None:
    made = running(max_restarts=0)
    going = Deletion(since=made.now, grace_s=600.0)
    end = WorkerOutcome(code=code, signal=signal)
    made.see(*(ended(worker(index, "Failed", code), outcome=end, deletion=going) for index in (0, 1)))
    assert judged(made) == (FailureAction.RESTART_IGNORE_MAX, 0)


def test_a_worker_that_had_failed_before_it_was_deleted_is_judged_by_its_end(running: Maker, worker: Maker) -> None:
    made = running()
    going = Deletion(since=made.now + 5, grace_s=0)
    made.see(worker(0), ended(worker(1, "Failed", 1, made.now), deletion=going))
    assert judged(made) == (FailureAction.RESTART, 1)


@pytest.mark.parametrize("how", ["disrupted", "deletion"])
def test_the_victims_of_an_evicted_worker_are_preempted(running: Maker, worker: Maker, how: str) -> None:
    going = {"disrupted": "Evicted"} if how == "disrupted" else {"deletion": Deletion(since=1000.0, grace_s=600.0)}
    made = running(max_restarts=0, settle_s=5)
    made.see(ended(worker(0), **going), worker(1, "Failed", ExitCode.PEER_LOST))
    made.now += 5
    assert judged(made) == (FailureAction.RESTART_IGNORE_MAX, 0)


def test_a_job_out_of_memory_is_restarted_with_a_warning(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(worker(0), ended(worker(1, "Failed", 137), outcome=WorkerOutcome(code=137, reason="OOMKilled")))
    first = made.plan()
    assert (first.status.failures[-1].action, first.status.restarts_towards_max) == (FailureAction.RESTART, 1)
    event = next((action.type, action.reason) for action in first.actions if hasattr(action, "reason"))
    assert event == ("Warning", "OOMKilled")


def short_lived(worker: Any, seconds: float) -> Any:
    return dataclasses.replace(worker, started_at=worker.finished_at - seconds)


def test_a_gang_whose_programs_end_at_once_has_wrong_arguments(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.plan()
    early = short_lived(worker(0, "Failed", 2), 5)
    made.see(early, worker(1))
    assert (made.plan().status.failures, made.plan().wake_at) == ((), made.now + made.job.spec.policy.settle_s)
    made.see(early, short_lived(worker(1, "Failed", 1), 59))
    assert judged(made)[0] is FailureAction.FAIL_JOB


def test_an_isolated_early_failure_is_restarted_after_the_settle_time(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(settle_s=5)
    made.plan()
    made.see(short_lived(worker(0, "Failed", 1), 5), worker(1))
    made.plan()
    made.now += 5
    assert judged(made) == (FailureAction.RESTART, 1)


@pytest.mark.parametrize(
    ("second_code", "action"),
    [(1, FailureAction.FAIL_JOB), (2, FailureAction.RESTART), (ExitCode.PEER_LOST, FailureAction.RESTART)],
    ids=["the same", "another code", "a lost peer"],
)
def test_the_only_worker_of_a_job_ends_at_once_twice_before_the_job_fails(
    plan_harness: Maker, worker: Maker, second_code: int, action: FailureAction
) -> None:
    made = plan_harness()
    made.spec(worker_groups=worker_groups(1))
    made.plan()
    made.see(short_lived(worker(0, "Failed", 1), 30))
    assert judged(made) == (FailureAction.RESTART, 1), "a stale file handle may be gone the next time"
    made.see()
    made.now += 10
    made.plan()
    made.see(short_lived(worker(0, "Failed", second_code, at=made.now, attempt=1), 30))
    assert judged(made)[0] is action


def test_the_only_worker_of_a_job_that_has_trained_may_end_at_once_again(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness()
    made.spec(worker_groups=worker_groups(1))
    made.plan()
    made.see(worker(0), progress=Progress(attempt=0, iteration=3))
    made.plan()
    made.see(worker(0, "Failed", 1))
    made.plan()
    made.see()
    made.now += 10
    made.plan()
    made.see(short_lived(worker(0, "Failed", 1, at=made.now, attempt=1), 5))
    assert judged(made) == (FailureAction.RESTART, 2)


@pytest.mark.parametrize(
    "case", ["late", "signal", "trained", "second attempt", "grown", "one of them late", "not started"]
)
def test_other_early_ends_are_restarted(plan_harness: Maker, worker: Maker, case: str) -> None:
    made = plan_harness()
    made.plan()
    first = short_lived(worker(0, "Failed", 1), 61 if case == "late" else 5)
    second = short_lived(worker(1, "Failed", 1), 61 if case in {"late", "one of them late"} else 5)
    if case == "signal":
        first = ended(first, outcome=WorkerOutcome(code=1, reason="RankKilled", signal=9))
    if case == "not started":
        first = ended(first, outcome=WorkerOutcome(code=1, reason="WorkerNotStarted"))
    if case == "second attempt":
        made.status(restarts=1)
    if case == "grown":  # after it was resumed, got smaller and ended to grow, which is not counted
        made.status(last_restart_time=made.now)
    page = Progress(attempt=0, iteration=3) if case == "trained" else None
    made.see(first, second, progress=page)
    assert judged(made) == (FailureAction.RESTART, 1)


def test_a_rule_may_fail_a_job_whose_worker_vanished(running: Maker, worker: Maker) -> None:
    rule = FailureRule(match=FailureMatch(reasons=("WorkerLost",)), action=FailureAction.FAIL_JOB)
    made = running(rules=(rule,))
    made.see(worker(0))
    assert judged(made) == (FailureAction.FAIL_JOB, 0)
