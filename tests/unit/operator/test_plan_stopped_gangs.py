"""Gangs that stop in order because one of their workers is deleted or disrupted: which worker the failure names."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_pods import actions, sound, standby
from worker_groups import worker_groups

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    CreateWorker,
    DeleteWorker,
    Deletion,
    FailureAction,
    FailureMatch,
    FailureRule,
    JobSpec,
    JobState,
    Observed,
    RestartWorker,
    Status,
    Worker,
    WorkerOutcome,
    WorkerPhase,
    plan,
)

Maker = Callable[..., Any]
NOW = 1000.0
TAKEN: dict[str, dict[str, Any]] = {
    "deleted": {"deletion": Deletion(since=NOW - 5, grace_s=30.0)},
    "disrupted": {"disrupted": "TerminationByKubelet"},
    "evicted": {"deletion": Deletion(since=NOW - 5, grace_s=30.0), "disrupted": "EvictionByEvictionAPI"},
    "by a clock that is ahead": {"deletion": Deletion(since=NOW + 600, grace_s=30.0)},
}


def stopped(worker: Worker, code: int = ExitCode.PREEMPTED, at: float = NOW, **changes: Any) -> Worker:
    """A worker whose pod has ended."""
    outcome = WorkerOutcome(code=code, reason="Preempted", message="words")
    ended = dataclasses.replace(worker, phase=WorkerPhase.FAILED, outcome=outcome, finished_at=at)
    return dataclasses.replace(ended, **changes)


@st.composite
def gangs(draw: st.DrawFn) -> tuple[list[Worker], list[int]]:
    """Draw how the workers of a gang ended, of which some were taken, and the order in which that is seen."""
    number = draw(st.integers(2, 12))
    taken = draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=2))
    in_place, ends = draw(st.booleans()), []
    for index in range(number):
        at = NOW - draw(st.floats(0, 2))
        if index not in taken:
            ends.append(stopped(runs(index), at=at, standby=in_place))
            continue
        code = draw(st.sampled_from([ExitCode.PREEMPTED, ExitCode.PEER_LOST, 137, 1]))
        ends.append(stopped(runs(index), code, at, **TAKEN[draw(st.sampled_from(["deleted", "disrupted", "evicted"]))]))
    return ends, draw(st.permutations(range(number)))


@settings(deadline=None)
@given(gang=gangs(), known_before=st.booleans())
def test_a_gang_that_stops_for_a_worker_names_it_in_any_order_of_ends(
    gang: tuple[list[Worker], list[int]], known_before: bool
) -> None:
    """`known_before`: True if deletions are seen before the ends, False if with the end of the worker alone."""
    ends, order = gang
    taken = {end.index for end in ends if end.taken}
    seen = {index: runs(index) for index in order}
    for index in taken if known_before else ():
        seen[index] = dataclasses.replace(seen[index], deletion=ends[index].deletion, disrupted=ends[index].disrupted)
    spec = JobSpec(name="job", uid="u", worker_groups=worker_groups(len(ends)), hub=False)
    job = JobState(spec=spec, status=Status(attempt_time=900.0, start_time=900.0, running_time=910.0))
    for number, index in enumerate(order):
        seen[index] = ends[index]
        made = plan(job, Observed(secret=True, workers=tuple(seen[key] for key in sorted(seen))), NOW + number * 0.1)
        job = dataclasses.replace(job, status=made.status)
        if job.status.attempt:
            break
    failure = job.status.failures[-1]
    assert failure.worker in taken
    assert failure.action is FailureAction.RESTART_IGNORE_MAX


@pytest.mark.parametrize("changes", TAKEN.values(), ids=TAKEN)
def test_a_worker_that_takes_longer_to_end_is_waited_for(
    running: Maker, worker: Maker, changes: dict[str, Any]
) -> None:
    made = running()
    made.see(stopped(worker(0)), worker(1))
    plan = made.plan()
    assert (actions(plan), plan.status.attempt, plan.wake_at) == ([], 0, NOW + 5)
    made.now += 4
    made.see(stopped(worker(0)), stopped(worker(1), at=NOW + 4, **changes))
    made.plan()
    assert failure_of(made).worker == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [(TAKEN["deleted"], "Preempted"), (TAKEN["evicted"], "EvictionByEvictionAPI"), ({}, "Preempted")],
    ids=["deleted", "evicted", "not known"],
)
def test_after_a_while_a_worker_that_is_being_deleted_is_named_all_the_same(
    running: Maker, worker: Maker, changes: dict[str, Any], reason: str
) -> None:
    made = running()
    made.see(stopped(worker(0)), dataclasses.replace(worker(1), node="n1", **changes))
    made.plan()
    made.now += 5
    made.plan()
    failure = failure_of(made)
    assert (failure.worker, failure.reason) == (1 if changes else 0, reason)
    assert failure.action is FailureAction.RESTART_IGNORE_MAX
    if changes:
        begin = "worker 1 is being deleted, and the gang has stopped: worker 0 failed with exit code 75: words"
        assert (failure.node, failure.exit_code) == ("n1", None)
        assert failure.message == f"{begin} (megatronapp logs job --worker 0 --attempt 0)"


def test_rules_about_disruptions_see_the_worker_that_takes_long_to_end(running: Maker, worker: Maker) -> None:
    match = FailureMatch(condition_types=("DisruptionTarget",))
    made = running(rules=(FailureRule(match=match, action=FailureAction.FAIL_JOB),))
    made.see(stopped(worker(0)), dataclasses.replace(worker(1), **TAKEN["evicted"]))
    made.now += 5
    made.plan()
    assert (failure_of(made).worker, failure_of(made).action) == (1, FailureAction.FAIL_JOB)


def test_a_gang_that_stops_for_a_worker_that_vanishes_names_it(running: Maker, worker: Maker) -> None:
    made = running()
    made.see(stopped(worker(0)))
    made.plan()
    assert (failure_of(made).worker, failure_of(made).reason) == (1, "WorkerLost")


@pytest.mark.parametrize("crashed", [0, 1], ids=["another", "the deleted one"])
def test_a_crash_before_a_gang_could_stop_is_named(running: Maker, worker: Maker, crashed: int) -> None:
    """Worker 1 is deleted meanwhile; a rank that crashes is no part of that, except its own."""
    made = running()
    ends = [stopped(worker(0), at=NOW + 2), stopped(worker(1), at=NOW + 2, **TAKEN["deleted"])]
    outcome = WorkerOutcome(code=1, reason="RankFailed", message="boom")
    ends[crashed] = dataclasses.replace(ends[crashed], outcome=outcome, finished_at=NOW)
    made.see(*ends)
    made.plan()
    counted = FailureAction.RESTART if crashed == 0 else FailureAction.RESTART_IGNORE_MAX
    assert (failure_of(made).worker, failure_of(made).action) == (crashed, counted)


def test_a_deletion_after_a_crash_is_no_cause(running: Maker, worker: Maker) -> None:
    made = running()
    late = {"deletion": Deletion(since=NOW + 60, grace_s=30.0)}
    made.see(stopped(worker(0)), stopped(worker(1), 1, NOW + 1, **late))
    made.plan()
    assert failure_of(made).worker == 0


def test_a_worker_that_stopped_in_order_twice_keeps_its_pod(running: Maker, worker: Maker) -> None:
    """Deletions of others may never be seen: their pods can vanish with them."""
    made = running(in_place=True)
    for attempt in range(2):
        seen = [standby(worker(index, attempt=attempt), ExitCode.PREEMPTED, "Preempted") for index in range(2)]
        made.see(*seen)
        plan = made.plan()
        assert (failure_of(made).worker, failure_of(made).attempt) == (0, attempt)
        assert not [action for action in actions(plan) if isinstance(action, DeleteWorker)]
        made.now += 40
        assert [type(action) for action in actions(made.plan())] == [RestartWorker, RestartWorker]
        made.see(*(sound(worker(index, attempt=attempt + 1)) for index in range(2)))
        made.plan()


def test_only_the_pods_of_deleted_workers_are_replaced(running: Maker, worker: Maker) -> None:
    """Worker 0 ends first each time, as happens where only the other has its pod to take down."""
    made = running(in_place=True)
    for attempt in range(3):
        first = standby(worker(0, attempt=attempt), ExitCode.PREEMPTED, "Preempted")
        leaving = stopped(sound(worker(1, attempt=attempt)), at=NOW + 1, **TAKEN["deleted"])
        made.see(first, leaving)
        made.plan()
        assert failure_of(made).worker == 1
        made.see(first)
        made.now += 100
        kinds = {action.index: type(action) for action in actions(made.plan())}
        assert kinds == {0: RestartWorker, 1: CreateWorker}
        made.see(*(sound(worker(index, attempt=attempt + 1)) for index in range(2)))
        made.plan()


def runs(index: int) -> Worker:
    """A worker of the first attempt."""
    found: Worker = sound(Worker(index=index, attempt=0, phase=WorkerPhase.RUNNING))
    return found


def failure_of(made: Any) -> Any:
    return made.job.status.failures[-1]
