"""Protection from evictions on a real API server: its answers to evictions, over operators that end in between."""

import asyncio
import time
from typing import Any

import kube
import pytest
from operator_simulation import KillableApi, OperatorSimulation, cordoned_node, manifest, simulated_operator

from megatronapp_common.names import ANNOTATION_SAVE
from megatronapp_common.save_request import SaveRequest
from megatronapp_operator.backends.kubernetes.client.resources import DISRUPTION_BUDGETS, JOBS, PODS, Object
from megatronapp_operator.backends.kubernetes.leaving_nodes import READ_S
from megatronapp_operator.backends.kubernetes.render.disruption import PROTECTED

pytestmark = pytest.mark.asyncio
PROTECT: dict[str, Any] = {"runPolicy": {"disruption": "Protect"}}
CHECKPOINT_FIRST: dict[str, Any] = {
    "runPolicy": {"disruption": "CheckpointFirst"},
    "checkpoint": {"save": "/runs/a", "saveInterval": 100, "volume": {"claim": "runs", "mountPath": "/runs"}},
}
AGE_S = 300
REFUSED, ACCEPTED = 429, 201
ANSWER_S, CONTROLLER_S = 180, 120


async def begun(stage: OperatorSimulation, **spec: Any) -> None:
    """Start a job whose two workers train."""
    await stage.train(manifest(stage.namespace, **spec))


async def evict(stage: OperatorSimulation, pod: str) -> int:
    """Send an eviction as `kubectl drain` does; return the status of the answer."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": stage.namespace}}
    while True:
        answer = await stage.nodes.client.post(PODS.path(stage.namespace, pod, "eviction"), json=body, timeout=ANSWER_S)
        if answer.status_code == ACCEPTED:
            return ACCEPTED
        assert answer.status_code == REFUSED, answer.text
        causes = answer.json().get("details", {}).get("causes", ())
        if "DisruptionBudget" in {cause["reason"] for cause in causes}:
            return REFUSED
        await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))  # the server has too many requests


async def budgets(stage: OperatorSimulation) -> dict[str, Object]:
    found = await stage.nodes.api.list_objects(DISRUPTION_BUDGETS, stage.namespace)
    return {budget["metadata"]["name"]: budget for budget in found.items}


async def edit(stage: OperatorSimulation, **policy: Any) -> None:
    job = await stage.job()
    job["spec"]["runPolicy"] |= policy
    await stage.nodes.api.replace(JOBS, job)
    await stage.rest()


async def condition(stage: OperatorSimulation, name: str = "job") -> tuple[str, str] | None:
    """Return status and reason of the condition about evictions."""
    conditions = (await stage.job(name))["status"]["conditions"]
    return next(
        ((entry["status"], entry["reason"]) for entry in conditions if entry["type"] == "EvictionsRefused"), None
    )


async def save_request(stage: OperatorSimulation, pod: str) -> SaveRequest | None:
    text = (await stage.nodes.pods())[pod]["metadata"]["annotations"].get(ANNOTATION_SAVE)
    return None if text is None else SaveRequest.parse(text)


async def test_by_default_any_worker_may_be_evicted(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        assert await budgets(stage) == {} and await condition(stage) is None
        assert await evict(stage, "job-worker-0") == ACCEPTED


async def test_no_worker_of_a_protected_gang_is_evicted_until_the_field_changes(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage, runPolicy={"disruption": "Protect", "restart": "InPlace", "spares": 1})
        (budget,) = (await budgets(stage)).values()
        assert budget["spec"]["minAvailable"] == 2
        (owner,) = budget["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("MegatronJob", "job", True)
        pods = await stage.nodes.pods()
        assert all(PROTECTED.items() <= pod["metadata"]["annotations"].items() for pod in pods.values())
        assert await condition(stage) == ("True", "Protected")
        for worker in ("job-worker-0", "job-worker-1"):
            assert await evict(stage, worker) == REFUSED
        assert await evict(stage, "job-spare-0-0") == ACCEPTED
        await edit(stage, disruption="Allow")
        assert await budgets(stage) == {} and await condition(stage) == ("False", "EvictionsAllowed")
        assert await evict(stage, "job-worker-1") == ACCEPTED


async def test_the_budget_is_restored_after_others_delete_or_change_it(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage, **PROTECT)
        (budget,) = (await budgets(stage)).values()
        assert await stage.reconciler.compare_owned_objects([namespace]) == []
        await stage.nodes.api.delete(DISRUPTION_BUDGETS, budget)
        assert await stage.reconciler.compare_owned_objects([namespace]) == [(namespace, "job")]
        await stage.rest()
        (budget,) = (await budgets(stage)).values()
        budget["spec"]["minAvailable"] = 0
        await stage.nodes.api.replace(DISRUPTION_BUDGETS, budget)
        assert await stage.reconciler.compare_owned_objects([namespace]) == [(namespace, "job")]
        await stage.rest()
        (budget,) = (await budgets(stage)).values()
        assert budget["spec"]["minAvailable"] == 2


async def test_a_budget_of_another_owner_stays_and_is_reported_at_the_job(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "other"}}}
        other = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": spec}
        metadata = {"name": "job-workers", "namespace": namespace}
        await stage.nodes.api.create(DISRUPTION_BUDGETS, other | {"metadata": metadata})
        await begun(stage, **PROTECT)
        assert await condition(stage) == ("False", "BudgetRefused")
        assert (await stage.job())["status"]["phase"] == "Running"
        await edit(stage, disruption="Allow")
        (budget,) = (await budgets(stage)).values()
        assert budget["spec"] == spec


async def test_a_drain_gets_its_eviction_once_a_checkpoint_was_requested_and_saved(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace, node_access=True) as stage:
        await stage.api.create(JOBS, manifest(namespace, "drained", **CHECKPOINT_FIRST))
        await stage.begin()
        await stage.rest()
        stage.report_progress("drained")
        await stage.pass_time(AGE_S)
        first, evicted = "drained-worker-0", "drained-worker-1"
        assert await condition(stage, "drained") == ("True", "CheckpointOld")
        assert await evict(stage, evicted) == REFUSED and await save_request(stage, first) is None
        async with cordoned_node(stage, f"node-of-{evicted}"):
            await stage.pass_time(READ_S)
            assert await condition(stage, "drained") == ("True", "EvictionWaits")
            assert await evict(stage, evicted) == REFUSED
            request = await save_request(stage, first)
            assert request is not None and (request.attempt, request.nodes) == (0, (f"node-of-{evicted}",))
            assert await save_request(stage, evicted) is None
            stage.report_progress("drained", iteration=9, checkpoint_iteration=9, checkpoint_time=stage.now() // 1)
            await stage.rest()
            assert await budgets(stage) == {} and await condition(stage, "drained") == ("False", "CheckpointYoung")
            assert await evict(stage, evicted) == ACCEPTED
            await stage.rest()
        status = (await stage.job("drained"))["status"]
        assert (status["attempt"], status["restarts"], status["restartsTowardsMax"]) == (1, 1, 0)
        assert status["progress"]["checkpointIteration"] == 9


async def test_without_the_right_to_read_nodes_evictions_wait_for_the_next_regular_checkpoint(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage, **CHECKPOINT_FIRST)
        async with cordoned_node(stage, f"node-of-{namespace}"):
            await stage.pass_time(AGE_S)
            assert await condition(stage) == ("True", "CheckpointOld")
            assert await evict(stage, "job-worker-1") == REFUSED
            assert await save_request(stage, "job-worker-0") is None
        stage.report_progress("job", iteration=9, checkpoint_iteration=9, checkpoint_time=stage.now() // 1)
        await stage.rest()
        assert await evict(stage, "job-worker-1") == ACCEPTED


@pytest.mark.full("more places of one run", but=("after-2",))
@pytest.mark.parametrize("place", range(1, 7))
@pytest.mark.parametrize("when", ["before", "after", "lost"])
async def test_operators_that_end_leave_a_budget_while_the_gang_runs_and_none_after_it(
    plane: kube.ControlPlane, namespace: str, when: str, place: int
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        api: KillableApi = stage.api

        def kill_at_request(number: int) -> str | None:
            return when if number == at else None

        at, api.kill_at = api.count + place, staticmethod(kill_at_request)
        await edit(stage, disruption="Protect")
        assert list(await budgets(stage)) == ["job-workers"] and await evict(stage, "job-worker-0") == REFUSED
        at = api.count + place
        for worker in ("job-worker-0", "job-worker-1"):
            await stage.nodes.end(worker, 0)
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Succeeded" and await budgets(stage) == {}


@pytest.mark.full("builds and runs kube-controller-manager")
async def test_the_disruption_controller_of_kubernetes_allows_no_disruption_of_the_gang(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        with kube.controller(plane, "disruption-controller"):
            await begun(stage, **PROTECT)
            deadline = time.monotonic() + CONTROLLER_S
            while (status := (await budgets(stage))["job-workers"].get("status", {})).get("currentHealthy") != 2:
                assert time.monotonic() < deadline, status
                await asyncio.sleep(0.1)
            assert (status["expectedPods"], status["desiredHealthy"], status["disruptionsAllowed"]) == (2, 2, 0)
            (reported,) = [entry for entry in status["conditions"] if entry["type"] == "DisruptionAllowed"]
            assert reported["reason"] == "InsufficientPods", "the controller must not fail over the pods' owner"
            assert await evict(stage, "job-worker-0") == REFUSED
            await edit(stage, disruption="Allow")
            assert await evict(stage, "job-worker-0") == ACCEPTED
