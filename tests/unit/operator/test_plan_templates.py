"""Templates of the workers of an attempt, and the worker that holds rank 0."""

from collections.abc import Callable
from typing import Any

import pytest
import rendered

from megatronapp_common.job import PinnedSettings, read_status, status_document
from megatronapp_common.names import ExitCode
from megatronapp_operator.backends.kubernetes.status_writer import attempt_template, rank_zero, with_facts
from megatronapp_operator.plan import (
    AttemptTemplate,
    ConditionType,
    CreateWorker,
    DeleteWorker,
    Progress,
    RecordEvent,
    Status,
    SuccessPolicy,
)

Maker = Callable[..., Any]


def backend_actions(made: Any) -> list[Any]:
    return [action for action in made.actions if not isinstance(action, RecordEvent)]


def starting(scene: Maker, *found: Any, template: str, generation: int) -> Any:
    """A gang that was made of `old` in generation 1 does not run yet, and the job is now as given."""
    made = scene()
    made.spec(template="old")
    made.plan()
    made.see(*found, attempt_template=AttemptTemplate(attempt=0, template="old", generation=1))
    made.plan()
    made.spec(template=template, generation=generation)
    return made


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_edit_recreates_a_gang_that_does_not_run_yet(plan_harness: Maker, worker: Maker, count: int) -> None:
    pods = [worker(index, "Pending") for index in range(count)]
    made = starting(plan_harness, *pods, template="new", generation=2)
    changed = made.plan()
    assert (changed.status.attempt, changed.status.restarts, changed.status.failures) == (1, 0, ())
    assert {type(action) for action in backend_actions(changed)} == ({DeleteWorker} if count else {CreateWorker})
    assert "GangOutdated" in [action.reason for action in changed.actions if isinstance(action, RecordEvent)]
    made.see()
    assert not count or backend_actions(made.plan()) == [CreateWorker(index=index, attempt=1) for index in (0, 1)]


def test_an_edit_that_changes_no_worker_changes_nothing(plan_harness: Maker, worker: Maker) -> None:
    made = starting(plan_harness, worker(0, "Pending"), worker(1, "Pending"), template="old", generation=2)
    assert made.plan().actions == ()


@pytest.mark.parametrize(("count", "attempt"), [(1, 1), (2, 0)], ids=["one is missing", "whole"])
def test_another_release_recreates_only_gangs_of_mixed_templates(
    plan_harness: Maker, worker: Maker, count: int, attempt: int
) -> None:
    pods = [worker(index, "Pending") for index in range(count)]
    made = starting(plan_harness, *pods, template="new", generation=1)
    assert made.plan().status.attempt == attempt


def test_a_gang_that_has_run_waits_with_an_edit_for_its_next_attempt(running: Maker, worker: Maker) -> None:
    made = running()
    made.spec(template="new", generation=2)
    made.see(worker(0), worker(1), attempt_template=AttemptTemplate(attempt=0, template="old", generation=1))
    assert made.plan().actions == ()


def test_what_was_pinned_is_read_again() -> None:
    pinned = PinnedSettings(
        attempt=3, trainer_image="t", analyzer_image="a", template_hash="h", key_id="k", generation=7
    )
    status = with_facts(rendered.make_job(), Status(attempt=3), manager="m", table=None, pinned=pinned, urls={})
    assert read_status(status_document(status)).pinned == pinned
    assert attempt_template(pinned) == AttemptTemplate(attempt=3, template="h", generation=7)


def test_with_rank0_the_worker_that_holds_it_ends_the_job(running: Maker, worker: Maker) -> None:
    made = running()
    made.spec(success=SuccessPolicy.RANK0, rank_zero=None)
    made.see(worker(0, "Succeeded", 0), worker(1))
    assert backend_actions(made.plan()) == [], "nobody knows yet where rank 0 is"
    made.see(worker(0, "Succeeded", 0), worker(1), rank_zero=1)
    assert (backend_actions(made.plan()), made.job.status.rank_zero) == ([], 1)
    made.see(worker(0), worker(1, "Succeeded", 0), rank_zero=None)
    made.status(succeeded=())
    assert backend_actions(made.plan()) == [DeleteWorker(index=0, attempt=0, grace_s=made.job.spec.policy.grace_s)]
    made.see(worker(0, "Failed", ExitCode.PREEMPTED), worker(1, "Succeeded", 0))
    assert made.plan().status.condition(ConditionType.COMPLETE).reason == "Rank0Succeeded"


def test_where_rank_0_was_is_forgotten_with_the_attempt(running: Maker, worker: Maker) -> None:
    made = running()
    made.spec(success=SuccessPolicy.RANK0, rank_zero=None)
    made.see(worker(0), worker(1), rank_zero=1, progress=Progress(attempt=0, iteration=1))
    made.plan()
    made.see(worker(0), worker(1, "Failed", 1), rank_zero=None)
    assert (made.plan().status.attempt, made.job.status.rank_zero) == (1, None)


@pytest.mark.parametrize(
    ("attempt", "workers", "found"),
    [
        (2, [{"index": 1, "ranks": [0, 1]}, {"index": 0, "ranks": [2, 3]}], 1),
        (1, [{"index": 1, "ranks": [0, 1]}], None),
        (2, [], None),
    ],
    ids=["by address", "older attempt", "in a ConfigMap"],
)
def test_the_rank_table_names_the_worker_of_rank_0(attempt: int, workers: list[Any], found: int | None) -> None:
    assert rank_zero({"attempt": attempt, "workers": workers}, 2) == found
    assert rank_zero(None, 2) is None
