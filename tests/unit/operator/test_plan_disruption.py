"""Protection from evictions: when a budget exists, and what is reported about it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_common.job import read_status, status_document
from megatronapp_common.job.api.status import ConditionType
from megatronapp_operator.plan import (
    Disruption,
    EnsureDisruptionBudget,
    Phase,
    RecordEvent,
    RemoveDisruptionBudget,
)
from megatronapp_operator.plan.policies.disruption import RETRY_S

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
    assert carried_out(made) == [EnsureDisruptionBudget()] and made.job.status.is_true(KIND)


def test_a_job_that_is_deleted_leaves_its_budget_to_the_garbage_collector(running: Maker) -> None:
    made = running(disruption=Disruption.PROTECT)
    made.observed = dataclasses.replace(made.observed, disruption_budget=True)
    made.job = dataclasses.replace(made.job, deletion_requested=True)
    assert carried_out(made) == []
