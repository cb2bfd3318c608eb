"""Lost machines, pods that the cluster removes and hubs that cannot start, as a real API server shows them."""

from typing import Any

import kube
import pytest
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS, Object

pytestmark = pytest.mark.asyncio


async def begun(stage: OperatorSimulation, **spec: Any) -> None:
    await stage.train(manifest(stage.namespace, **spec))


def condition(stage: OperatorSimulation, kind: str, status: bool, **others: str) -> Object:
    return {"type": kind, "status": str(status), "lastTransitionTime": stage.nodes.timestamp(), **others}


async def change(stage: OperatorSimulation, pod: str, **status: Any) -> None:
    """Write into the status of a pod what a controller or a kubelet writes."""
    await stage.nodes._send("PATCH", f"{pod}/status", {"status": status})


async def reasons(stage: OperatorSimulation) -> list[str]:
    return [item["reason"] for item in (await stage.nodes.api.list_objects(EVENTS, stage.namespace)).items]


def found(job: Object, kind: str) -> Object:
    return next(condition for condition in job["status"]["conditions"] if condition["type"] == kind)


async def test_a_worker_on_a_silent_node_is_given_up_after_its_timeout(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage, runPolicy={"maxRestarts": 0, "lostNodeTimeoutSeconds": 300})
        await change(
            stage,
            "job-worker-1",
            conditions=[condition(stage, "Ready", False), condition(stage, "ContainersReady", True)],
        )
        await stage.pass_time(200)
        assert (await stage.job())["status"]["attempt"] == 0
        await stage.pass_time(101)
        status = (await stage.job())["status"]
        assert (status["attempt"], status["restarts"], status["restartsTowardsMax"]) == (1, 1, 0)
        failure = status["failures"][-1]
        assert (failure["reason"], failure["node"]) == ("LostNode", "node-of-job-worker-1")
        await stage.pass_time(11)
        assert set(await stage.nodes.pods()) == {"job-worker-0", "job-worker-1"}


async def test_a_hub_that_does_not_start_is_a_condition_until_it_runs(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage, analyzer={"enabled": True}, trace={"enabled": True})
        pull = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
        hub = {"name": "hub", "image": "none", "imageID": "", "ready": False, "restartCount": 0, "state": pull}
        unready = condition(stage, "Ready", False, reason="ContainersNotReady")
        await change(stage, "job-hub", phase="Pending", conditions=[unready], containerStatuses=[hub])
        await stage.rest(with_nodes=False)
        job = await stage.job()
        assert job["status"]["phase"] == "Running"
        assert found(job, "HubReady")["status"] == "False" and "not found" in found(job, "HubReady")["message"]
        pull["waiting"]["reason"] = "ImagePullBackOff"
        await change(stage, "job-hub", containerStatuses=[hub])
        await stage.rest(with_nodes=False)
        assert (await reasons(stage)).count("HubNotRunning") == 1
        await stage.rest()  # the machine starts it
        assert found(await stage.job(), "HubReady")["status"] == "True"


async def test_pods_whose_deletion_no_watch_reported_hold_no_restart_up(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        await stage.nodes.end("job-worker-1", 42)
        await stage.refresh()
        await stage.reconcile()
        while await stage.nodes.settle():
            pass
        assert await stage.nodes.pods() == {}
        for _ in range(3):  # without a look: a watch that began again has not delivered the deletions
            stage.skipped_s += 40
            await stage.reconcile()
        assert {"job-worker-0", "job-worker-1"} <= set(await stage.nodes.pods())


async def test_initializers_that_are_evicted_are_tried_again_outside_of_the_budget(
    plane: kube.ControlPlane, namespace: str
) -> None:
    initializer = {"name": "data", "image": "busybox", "storageUri": "s3://a/b", "target": "/data", "scope": "Job"}
    data = {"mock": True, "volume": {"claim": "data", "mountPath": "/data"}}
    async with simulated_operator(plane, namespace) as stage:
        made = manifest(namespace, initializers=[initializer], data=data, runPolicy={"maxRestarts": 0})
        await stage.api.create(JOBS, made)
        await stage.begin()
        await stage.rest()
        first = (await stage.nodes.pods())["job-init"]["metadata"]["uid"]
        await change(stage, "job-init", phase="Failed", reason="Evicted", message="low on memory", containerStatuses=[])
        await stage.rest()
        status = (await stage.job())["status"]
        assert (status["initRestarts"], status["failures"][-1]["reason"]) == (0, "Evicted")
        await stage.pass_time(11)
        pods = await stage.nodes.pods()
        assert set(pods) == {"job-init"} and pods["job-init"]["metadata"]["uid"] != first
        await stage.nodes.end("job-init", 0)
        await stage.rest()
        assert set(await stage.nodes.pods()) >= {"job-worker-0", "job-worker-1"}
