"""Budgets that the cluster refuses: a gang trains without one, and is not held up."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import rendered

from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, NameTakenError, api_error_for
from megatronapp_operator.backends.kubernetes.execution.budgets import DisruptionBudgets
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext
from megatronapp_operator.backends.kubernetes.execution.objects import ObjectApplier
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings
from megatronapp_operator.errors import OperatorError
from megatronapp_operator.plan.policies.disruption import RETRY_S

pytestmark = pytest.mark.asyncio
ENDING = {"causes": [{"reason": "NamespaceTerminating"}]}


class Refusing(ObjectApplier):
    """Applier to a cluster that answers each object with an error; None: it takes them."""

    def __init__(self, error: OperatorError | None) -> None:
        self.error = error

    async def put(self, work: JobContext, rendered: Sequence[Any]) -> None:
        if self.error is not None:
            raise self.error


def answer(status: int, **details: Any) -> ApiError:
    text = "admission webhook pdb.example.io denied the request"
    return api_error_for(status, {"message": text, "details": details}, "apply poddisruptionbudgets")


def name_of(error: object) -> str:
    return f"{type(error).__name__}-{error.status}" if isinstance(error, ApiError) else type(error).__name__


def context() -> JobContext:
    job = rendered.make_job({"runPolicy": {"disruption": "Protect"}})
    owner, attempt = rendered.owner_of(job), AttemptSettings(number=0)
    return JobContext(document={}, job=job, owner=owner, attempt=attempt, settings=rendered.SETTINGS)


@pytest.mark.parametrize(
    "error", [*(answer(status) for status in (400, 403, 404, 413, 422)), NameTakenError("taken")], ids=name_of
)
async def test_a_refusal_is_remembered_and_tried_again_later(error: OperatorError) -> None:
    now, work, objects = [0.0], context(), Refusing(error)
    budgets = DisruptionBudgets(cast("KubernetesApi", None), objects, clock=lambda: now[0])
    await budgets.ensure(work)
    assert budgets.exists(work.owner.uid) is None and budgets.refusal(work.owner.uid) == str(error)
    now[0] += RETRY_S
    assert budgets.refusal(work.owner.uid) == ""
    objects.error = None
    await budgets.ensure(work)
    assert budgets.exists(work.owner.uid) is True and budgets.refusal(work.owner.uid) == ""


@pytest.mark.parametrize(
    "error", [answer(0), answer(409), answer(429), answer(500), answer(403, **ENDING)], ids=name_of
)
async def test_an_error_that_may_pass_is_raised(error: ApiError) -> None:
    work = context()
    budgets = DisruptionBudgets(cast("KubernetesApi", None), Refusing(error))
    with pytest.raises(type(error)):
        await budgets.ensure(work)
    assert budgets.exists(work.owner.uid) is None and budgets.refusal(work.owner.uid) == ""
