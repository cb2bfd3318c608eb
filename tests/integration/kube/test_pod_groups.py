"""Pod groups of gang schedulers go with their attempt, on a real API server that knows their definitions."""

from typing import Any

import kube
import pytest
from operator_simulation import KillableApi, OperatorSimulation, manifest, simulated_operator
from volcano import VolcanoNodes

from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError
from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS, PODS, Object
from megatronapp_operator.backends.kubernetes.render.queueing import GROUPS

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def schedulers(plane: kube.ControlPlane) -> kube.ControlPlane:
    """The control plane with the pod groups of all schedulers."""
    for project in GROUPS:
        plane.define(kube.ROOT / "tests" / "fixtures" / "kube" / f"{project.lower()}-podgroups.yaml")
    return plane


def gang(namespace: str, scheduler: str, **spec: Any) -> Object:
    resources = {"requests": {"cpu": "1"}}
    return manifest(namespace, scheduling={"gang": scheduler}, resources=resources, **spec)


async def groups(stage: OperatorSimulation, scheduler: str) -> set[str]:
    listing = await stage.nodes.api.list_objects(GROUPS[scheduler], stage.namespace)
    return {item["metadata"]["name"] for item in listing.items}


async def set_suspend(stage: OperatorSimulation, *, suspend: bool) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    path = JOBS.path(stage.namespace, "job")
    answer = await stage.nodes.client.patch(path, json={"spec": {"suspend": suspend}}, headers=headers)
    assert answer.is_success, answer.text


@pytest.mark.full("cases that differ in the scheduler", but=("Coscheduling",))
@pytest.mark.parametrize("scheduler", GROUPS)
async def test_a_group_is_removed_with_its_attempt(
    schedulers: kube.ControlPlane, namespace: str, scheduler: str
) -> None:
    async with simulated_operator(schedulers, namespace) as stage:
        await stage.train(gang(namespace, scheduler))
        assert await groups(stage, scheduler) == {"job-a0"}
        await stage.nodes.end("job-worker-1", 42)
        await stage.rest()
        assert await groups(stage, scheduler) == set()
        await stage.pass_time(11)
        assert await groups(stage, scheduler) == {"job-a1"}
        await set_suspend(stage, suspend=True)
        await stage.rest()
        assert await groups(stage, scheduler) == set()
        await set_suspend(stage, suspend=False)
        await stage.rest()
        assert await groups(stage, scheduler) == {"job-a2"}
        for name in await stage.nodes.pods():
            await stage.nodes.end(name, 0)
        await stage.rest()
        await stage.pass_time(3)
        status = (await stage.job())["status"]
        assert await groups(stage, scheduler) == set()
    assert (status["phase"], status["podGroups"]) == ("Succeeded", [])


async def test_a_restarted_gang_is_admitted_by_a_queue_of_its_own_size(
    schedulers: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(schedulers, namespace) as stage:
        stage.nodes = VolcanoNodes(stage.nodes.api, namespace, stage.nodes.client, stage.now, cpus=2)
        await stage.train(gang(namespace, "Volcano"))
        for attempt in (1, 2, 3):
            await stage.nodes.end("job-worker-0", 42)
            await stage.rest()
            await stage.pass_time(60)
            stage.report_progress("job")
            await stage.rest()
            status = (await stage.job())["status"]
            assert (status["phase"], status["attempt"]) == ("Running", attempt)


async def test_a_group_that_is_left_by_an_operator_that_ends_is_removed_by_the_next(
    schedulers: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(schedulers, namespace) as stage:
        await stage.train(gang(namespace, "Coscheduling"))
        pods = await stage.nodes.pods()
        stage.api.kill_at = lambda _number: "before"
        await set_suspend(stage, suspend=True)
        with pytest.raises(AssertionError, match="does not come to rest"):
            await stage.rest(rounds=3)
        for pod in pods.values():
            await stage.nodes.api.delete(PODS, pod, grace_s=0)
        stage.api.kill_at = KillableApi.kill_at
        await stage.begin()
        await stage.rest()
        assert await groups(stage, "Coscheduling") == set()


async def test_a_group_that_may_not_be_removed_is_reported_once_and_blocks_nothing(
    schedulers: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as after an upgrade without the chart's new rights."""
    real = KillableApi.delete

    async def refusing(api: KillableApi, resource: Any, obj: Object, **options: Any) -> Object | None:
        if resource.plural == "podgroups":
            raise ForbiddenError("podgroups is forbidden", status=403)
        return await real(api, resource, obj, **options)

    monkeypatch.setattr(KillableApi, "delete", refusing)
    async with simulated_operator(schedulers, namespace) as stage:
        await stage.train(gang(namespace, "KAI"))
        await stage.nodes.end("job-worker-1", 42)
        await stage.rest()
        await stage.pass_time(11)
        stage.report_progress("job")
        await stage.rest()
        status = (await stage.job())["status"]
        events = [item["reason"] for item in (await stage.nodes.api.list_objects(EVENTS, namespace)).items]
    assert (status["phase"], status["attempt"], status["podGroups"]) == ("Running", 1, [1])
    assert events.count("GroupNotRemoved") == 1


async def test_a_group_of_another_owner_stays(schedulers: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(schedulers, namespace) as stage:
        await stage.train(gang(namespace, "Volcano"))
        headers = {"Content-Type": "application/merge-patch+json"}
        path = GROUPS["Volcano"].path(namespace, "job-a0")
        labels = {"metadata": {"labels": {"megatronapp.io/job-uid": "another"}}}
        answer = await stage.nodes.client.patch(path, json=labels, headers=headers)
        assert answer.is_success, answer.text
        await set_suspend(stage, suspend=True)
        await stage.rest()
        assert await groups(stage, "Volcano") == {"job-a0"}
