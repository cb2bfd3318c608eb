"""Changes that a hub of the author's own making reports, as Events on a real API server."""

import kube
import pytest
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS
from megatronapp_operator.backends.kubernetes.observe import PollResult
from megatronapp_operator.plan import ControlAction
from megatronapp_operator.plan.policies.user_actions import BUCKET_SIZE, MAX_EVENTS, REFILL_S
from megatronapp_operator.plan_io.hub_summary import HubSummary

pytestmark = pytest.mark.asyncio


async def events(stage: OperatorSimulation, *numbers: int) -> int:
    """Return the number of events after the hub has reported these."""
    memory = stage.reconciler.memory((stage.namespace, "job"))
    assert memory is not None
    memory.poll_result = PollResult(
        summary=HubSummary(controls=tuple(ControlAction(id=number, text="made up") for number in numbers))
    )
    await stage.rest()
    found = (await stage.nodes.api.list_objects(EVENTS, stage.namespace)).items
    return len([event for event in found if event["reason"] == "ScopeControl"])


async def test_a_hub_that_makes_up_changes_makes_few_events(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        began = stage.now()
        await stage.api.create(JOBS, manifest(namespace, analyzer={"enabled": True}))
        await stage.begin()
        await stage.rest()
        assert await events(stage, (1 << 53) - 1) == 0
        assert await events(stage, 1) == 1, "an action of the future hides none"
        assert await events(stage, *range(64)) == 1 + MAX_EVENTS
        for first in range(64, 64 * 6, 64):
            found = await events(stage, *range(first, first + 64))
        assert 1 + MAX_EVENTS < found <= BUCKET_SIZE + (stage.now() - began) / REFILL_S
        plane.kubectl("annotate", "mgj", "job", "-n", namespace, "written=by-the-author")
        found = await events(stage, *range(400, 464))
        assert found <= BUCKET_SIZE + (stage.now() - began) / REFILL_S, "who writes to the job gets no more turns"
        await stage.pass_time(2 * REFILL_S)
        assert found < await events(stage, *range(464, 528)) <= BUCKET_SIZE + (stage.now() - began) / REFILL_S
