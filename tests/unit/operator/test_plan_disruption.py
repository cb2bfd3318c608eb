"""Protection from evictions: when a budget exists, and what is reported about it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_common.job import read_status, status_document
from megatronapp_common.job.api.status import ConditionType
from megatronapp_common.text.times import rfc3339
from megatronapp_operator.plan import (
    Disruption,
    EnsureDisruptionBudget,
    LeavingNode,
    Phase,
    Progress,
    RecordEvent,
    RemoveDisruptionBudget,
    RequestCheckpoint,
)
from megatronapp_operator.plan.policies.disruption import REPEAT_S, RETRY_S, UNANSWERED_S

Maker = Callable[..., Any]
KIND = ConditionType.EVICTIONS_REFUSED
BUDGETS = (EnsureDisruptionBudget, RemoveDisruptionBudget)


def budgets(made: Any) -> list[Any]:
    return [action for action in made.actions if isinstance(action, BUDGETS)]


def carried_out(made: Any) -> list[Any]:
    """Plan, do what is planned about the budget, and return that."""
    found = budgets(made.plan())
    for action in found:
        made.observed = dataclasses.replace(
            made.observed, disruption_budget=isinstance(action, EnsureDisruptionBudget), budget_refusal=""
        )
    return found


def test_a_job_that_allows_evictions_has_neither_budget_nor_condition(running: Maker) -> None:
    made = running()
    assert budgets(made.plan()) == [] and made.job.status.condition(KIND) is None
    made.job = dataclasses.replace(made.job, deletion_requested=True)
    assert budgets(made.plan()) == []


def test_a_protected_gang_has_a_budget_from_its_creation_to_its_end(plan_harness: Maker, worker: Maker) -> None:
    made = plan_harness(disruption=Disruption.PROTECT)
    assert carried_out(made) == [EnsureDisruptionBudget()]
    assert made.job.status.condition(KIND).reason == "Protected"
    assert made.job.status.is_true(KIND)
    made.see(worker(0), worker(1))
    assert carried_out(made) == []
    made.see(worker(0, "Succeeded", 0), worker(1, "Succeeded", 0))
    assert carried_out(made) == [RemoveDisruptionBudget()]
    assert made.job.status.phase is Phase.SUCCEEDED and not made.job.status.is_true(KIND)
    assert carried_out(made) == []


def test_between_two_attempts_evictions_are_allowed(running: Maker, worker: Maker) -> None:
    made = running(disruption=Disruption.PROTECT)
    carried_out(made)
    made.see(worker(0), worker(1, "Failed", 1))
    assert carried_out(made) == [RemoveDisruptionBudget()] and made.job.status.attempt == 1
    made.see()
    made.now += 10
    assert carried_out(made) == [EnsureDisruptionBudget()]


def test_a_suspended_job_has_no_budget(running: Maker) -> None:
    made = running(disruption=Disruption.PROTECT)
    carried_out(made)
    made.spec(suspend=True)
    assert carried_out(made) == [RemoveDisruptionBudget()]


def test_an_edit_sets_and_removes_the_budget_of_a_gang_that_runs(running: Maker) -> None:
    made = running()
    for disruption, action in (
        (Disruption.PROTECT, EnsureDisruptionBudget()),
        (Disruption.ALLOW, RemoveDisruptionBudget()),
    ):
        made.spec(policy=dataclasses.replace(made.job.spec.policy, disruption=disruption))
        assert carried_out(made) == [action]
        assert carried_out(made) == []


@pytest.mark.parametrize("known", [None, True, False])
def test_an_operator_that_starts_again_sets_or_removes_it_once_more(running: Maker, known: bool | None) -> None:
    """Check that the status is memory enough: the one before may have ended between status and action."""
    made = running(disruption=Disruption.PROTECT)
    carried_out(made)
    made.job = dataclasses.replace(made.job, status=read_status(status_document(made.job.status)))
    made.observed = dataclasses.replace(made.observed, disruption_budget=known)
    assert carried_out(made) == ([] if known else [EnsureDisruptionBudget()])
    made.spec(policy=dataclasses.replace(made.job.spec.policy, disruption=Disruption.ALLOW))
    made.plan()
    made.observed = dataclasses.replace(made.observed, disruption_budget=known)
    assert carried_out(made) == ([] if known is False else [RemoveDisruptionBudget()])


def test_without_the_right_the_gang_trains_and_the_job_reports_it(running: Maker) -> None:
    made = running(disruption=Disruption.PROTECT)
    made.observed = dataclasses.replace(made.observed, disruption_budget=None, budget_refusal="no right")
    plan = made.plan()
    assert budgets(plan) == [] and plan.wake_at <= made.now + RETRY_S
    (event,) = [action for action in plan.actions if isinstance(action, RecordEvent)]
    assert (event.reason, event.message) == ("BudgetRefused", "evictions are not refused: no right")
    condition = made.job.status.condition(KIND)
    assert (condition.status, condition.reason) == (False, "BudgetRefused")
    assert not [action for action in made.plan().actions if isinstance(action, RecordEvent)]
    made.observed = dataclasses.replace(made.observed, budget_refusal="")
    plan = made.plan()
    assert plan.actions == (EnsureDisruptionBudget(),) and not made.job.status.is_true(KIND), "it may fail again"
    assert carried_out(made) == [EnsureDisruptionBudget()]
    assert carried_out(made) == [] and made.job.status.is_true(KIND)


def test_a_job_that_is_deleted_leaves_its_budget_to_the_garbage_collector(running: Maker) -> None:
    made = running(disruption=Disruption.PROTECT)
    made.observed = dataclasses.replace(made.observed, disruption_budget=True)
    made.job = dataclasses.replace(made.job, deletion_requested=True)
    assert carried_out(made) == []


AGE_S = 300.0


def requests(made: Any) -> list[Any]:
    return [action.request for action in made.actions if isinstance(action, RequestCheckpoint)]


def report(made: Any, iteration: int, taken_at: float | None) -> None:
    """Report a checkpoint of the newest step, taken at a time by the clock of its node; None: that is not reported."""
    page = Progress(attempt=0, iteration=iteration, checkpoint_iteration=iteration, checkpoint_time=taken_at)
    made.observed = dataclasses.replace(made.observed, progress=page)


@pytest.fixture
def careful(running: Maker, worker: Maker) -> Maker:
    """A gang that trains on two nodes, and may be evicted while its newest checkpoint is young."""

    def make() -> Any:
        made = running(disruption=Disruption.CHECKPOINT_FIRST, checkpoint_age_s=AGE_S)
        made.see(*(dataclasses.replace(worker(index), node=f"n{index}") for index in range(2)))
        made.plan()
        return made

    return make


def test_evictions_are_refused_while_the_newest_checkpoint_is_old(careful: Maker) -> None:
    made = careful()
    assert carried_out(made) == [] and made.job.status.condition(KIND) is None, "nothing can be lost yet"
    made.now += AGE_S - 1
    assert carried_out(made) == [] and made.plan().wake_at == made.now + 1
    made.now += 1
    assert carried_out(made) == [EnsureDisruptionBudget()]
    condition = made.job.status.condition(KIND)
    assert (condition.reason, condition.message.partition("; ")[2]) == (
        "CheckpointOld", "this attempt has no checkpoint yet",
    )  # fmt: skip
    made.now += 50
    report(made, 7, taken_at=made.now - 10)
    assert carried_out(made) == [RemoveDisruptionBudget()]
    assert made.job.status.condition(KIND).reason == "CheckpointYoung"
    made.now += AGE_S - 11
    assert carried_out(made) == []
    made.now += 1
    assert carried_out(made) == [EnsureDisruptionBudget()]
    assert "of step 7, taken at 1970-01-01T00:22:20Z" in made.job.status.condition(KIND).message


@pytest.mark.parametrize("ahead", [0.0, 86400.0])
def test_no_clock_makes_a_checkpoint_younger_than_it_is(careful: Maker, ahead: float) -> None:
    made = careful()
    made.now += AGE_S
    report(made, 7, taken_at=made.now + ahead)
    seen_at = made.now
    assert carried_out(made) == []
    made.now += AGE_S - 1
    report(made, 7, taken_at=seen_at + ahead)
    assert carried_out(made) == []
    made.job = dataclasses.replace(made.job, status=read_status(status_document(made.job.status)))
    made.now += 1
    assert carried_out(made) == [EnsureDisruptionBudget()]


def test_ranks_of_an_earlier_release_save_at_unknown_times(careful: Maker) -> None:
    made = careful()
    report(made, 7, taken_at=None)
    made.now += AGE_S
    assert carried_out(made) == [EnsureDisruptionBudget()]
    message = made.job.status.condition(KIND).message.partition("; ")[2]
    assert (
        message == "the newest is of step 7, and the trainer, of an earlier release, does not report when it was taken"
    )


def test_a_hub_of_an_earlier_release_hides_no_checkpoint_that_a_launcher_has_reported(careful: Maker) -> None:
    made = careful()
    made.now += AGE_S
    carried_out(made)
    report(made, 7, taken_at=made.now - 10)
    assert carried_out(made) == [RemoveDisruptionBudget()]
    report(made, 8, taken_at=None)
    assert carried_out(made) == []
    progress = made.job.status.progress
    assert (progress.iteration, progress.checkpoint_iteration, progress.checkpoint_time) == (8, 7, made.now - 10)


def test_a_restart_begins_without_a_budget_and_forgets_the_checkpoints_before(careful: Maker, worker: Maker) -> None:
    made = careful()
    made.now += AGE_S
    carried_out(made)
    made.see(worker(0), worker(1, "Failed", 1))
    assert carried_out(made) == [RemoveDisruptionBudget()]
    made.see()
    made.now += 10
    made.plan()
    made.see(worker(0, attempt=1), worker(1, attempt=1))
    made.plan()
    report(made, 9, taken_at=made.now + AGE_S)  # of the attempt before
    made.now += AGE_S
    assert carried_out(made) == [EnsureDisruptionBudget()]


def test_a_node_that_is_to_be_emptied_gets_its_eviction_after_a_checkpoint(careful: Maker) -> None:
    made = careful()
    made.observed = dataclasses.replace(made.observed, leaving_nodes=(LeavingNode(name="n1", reason="is cordoned"),))
    made.now += AGE_S - 1
    plan = made.plan()
    assert requests(plan) == [] and budgets(plan) == [], "evictions pass at once while little would be lost"
    made.now += 1
    plan = made.plan()
    (request,) = requests(plan)
    assert (request.attempt, request.time, request.nodes) == (0, int(made.now), ("n1",))
    (event,) = [action for action in plan.actions if isinstance(action, RecordEvent)]
    message = "node n1 is cordoned: an eviction waits for a checkpoint; this attempt has no checkpoint yet"
    assert (event.reason, event.message) == ("EvictionWaits", message)
    assert made.job.status.condition(KIND).reason == "EvictionWaits"
    carried_out(made)
    first, second = made.observed.workers
    made.see(dataclasses.replace(first, save_request=request), second)
    assert made.plan().actions == (), "what was requested is not requested again"
    report(made, 8, taken_at=made.now + 2)
    made.now += 3
    plan = made.plan()
    assert budgets(plan) == [RemoveDisruptionBudget()] and requests(plan) == []
    (event,) = [action for action in plan.actions if isinstance(action, RecordEvent)]
    assert event.reason == "CheckpointYoung" and event.message.startswith("workers may be evicted until ")


def test_a_checkpoint_is_requested_again_for_another_node_or_after_a_while(careful: Maker) -> None:
    made = careful()
    made.observed = dataclasses.replace(made.observed, leaving_nodes=(LeavingNode(name="n0", reason="is cordoned"),))
    made.now += AGE_S
    carried_out(made)

    def carry_out_requests() -> list[int]:
        found = requests(made.plan())
        first, second = made.observed.workers
        if found:
            made.see(dataclasses.replace(first, save_request=found[0]), second)
        return [request.time for request in found]

    began = int(made.now)
    assert carry_out_requests() == [began]
    assert made.plan().wake_at == began + UNANSWERED_S
    made.now += UNANSWERED_S
    assert carry_out_requests() == [began + UNANSWERED_S], "no rank has answered"
    answered = made.now + 5
    made.now += 10
    report(made, 8, taken_at=answered)
    assert carried_out(made) == [RemoveDisruptionBudget()]
    made.now += AGE_S
    assert carry_out_requests() == [], "the node stays cordoned, and nothing was evicted"
    later = f"so the next is requested at {rfc3339(began + UNANSWERED_S + REPEAT_S)}"
    assert made.job.status.condition(KIND).message.endswith(later)
    leaving = tuple(LeavingNode(name=name, reason="is cordoned") for name in ("n0", "n1"))
    made.observed = dataclasses.replace(made.observed, leaving_nodes=leaving)
    again = int(made.now)
    assert carry_out_requests() == [again]
    report(made, 9, taken_at=made.now + 1)
    made.now = again + REPEAT_S - 1
    assert carry_out_requests() == []
    made.now += 1
    assert carry_out_requests() == [again + REPEAT_S]


def test_nodes_of_others_cause_no_request(careful: Maker) -> None:
    made = careful()
    made.observed = dataclasses.replace(made.observed, leaving_nodes=(LeavingNode(name="n7", reason="is cordoned"),))
    made.now += AGE_S
    plan = made.plan()
    assert requests(plan) == [] and made.job.status.condition(KIND).reason == "CheckpointOld"
