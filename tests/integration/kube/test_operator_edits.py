"""Changes around a job before its gang runs: its own spec, and what denies its pods."""

import contextlib
import json
from typing import Any

import kube
import pytest
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import JOBS, Object

pytestmark = pytest.mark.asyncio


async def created(stage: OperatorSimulation, **spec: Any) -> Object:
    """Return a job that the operator has reconciled, and whose pods no machine has started."""
    await stage.api.create(JOBS, manifest(stage.namespace, **spec))
    await stage.begin()
    with contextlib.suppress(AssertionError):  # one that is denied does not come to rest
        await stage.rest(with_nodes=False)
    return await stage.job()


def edit(plane: kube.ControlPlane, namespace: str, **spec: Any) -> None:
    patch = json.dumps({"spec": spec})
    done = plane.kubectl("patch", "mgj", "job", "-n", namespace, "--type=merge", "-p", patch)
    assert done.returncode == 0, done.stderr


async def made_of(stage: OperatorSimulation) -> dict[str, set[str]]:
    """Images and attempts of the workers that are there."""
    pods = (await stage.nodes.pods()).values()
    return {
        "images": {pod["spec"]["containers"][0]["image"] for pod in pods},
        "attempts": {pod["metadata"]["labels"]["megatronapp.io/attempt"] for pod in pods},
    }


async def test_an_image_that_is_edited_before_the_gang_runs_is_that_of_all_workers(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        job = await created(stage, image="registry.test/trainer:typo")
        assert job["status"]["pinned"]["generation"] == job["metadata"]["generation"]
        await stage.nodes.start((await stage.nodes.pods())["job-worker-0"])
        edit(plane, namespace, image="registry.test/trainer:right")
        await stage.rest()
        job = await stage.job()
        assert await made_of(stage) == {"images": {"registry.test/trainer:right"}, "attempts": {"1"}}
        assert job["status"]["pinned"]["generation"] == job["metadata"]["generation"]
        assert (job["status"]["restarts"], job["status"]["failures"]) == (0, [])


async def test_an_edit_of_a_gang_that_runs_waits_for_its_next_attempt(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        job = await created(stage, image="registry.test/trainer:1")
        await stage.rest()
        edit(plane, namespace, image="registry.test/trainer:2")
        await stage.rest()
        assert await made_of(stage) == {"images": {"registry.test/trainer:1"}, "attempts": {"0"}}
        assert (await stage.job())["status"]["pinned"]["generation"] == job["metadata"]["generation"]
        await stage.nodes.end("job-worker-1", 42)
        await stage.rest()
        await stage.pass_time(11)
        assert await made_of(stage) == {"images": {"registry.test/trainer:2"}, "attempts": {"1"}}


async def test_pods_that_lack_a_priority_class_wait_for_it(plane: kube.ControlPlane, namespace: str) -> None:
    name = f"late-{namespace}"
    async with simulated_operator(plane, namespace) as stage:
        job = await created(stage, priorityClassName=name)
        scheduled = next(condition for condition in job["status"]["conditions"] if condition["type"] == "PodsScheduled")
        assert (job["status"]["phase"], scheduled["reason"]) == ("Pending", "PodDenied")
        assert f"no PriorityClass with name {name} was found" in scheduled["message"]
        plane.create_priority_class(name, 7, namespace)
        await stage.pass_time(60)
        assert len(await stage.nodes.pods()) == 2
        assert "deniedTime" not in (await stage.job())["status"]
