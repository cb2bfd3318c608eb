"""Lost machines, pods that the cluster removes and hubs that cannot start, as a real API server shows them."""

import datetime
from typing import Any

import kube
import pytest
from operator_play import Play, manifest, play

from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, JOBS, Object

pytestmark = pytest.mark.asyncio


async def begun(stage: Play, **spec: Any) -> None:
    await stage.api.create(JOBS, manifest(stage.namespace, **spec))
    await stage.begin()
    await stage.rest()
    stage.tell("job")
    await stage.rest()


def condition(kind: str, status: bool, **others: str) -> Object:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"type": kind, "status": str(status), "lastTransitionTime": now, **others}


async def change(stage: Play, pod: str, **status: Any) -> None:
    """Write into the status of a pod what a controller or a kubelet writes."""
    await stage.machines._send("PATCH", f"{pod}/status", {"status": status})


async def reasons(stage: Play) -> list[str]:
    return [one["reason"] for one in (await stage.machines.api.list_objects(EVENTS, stage.namespace)).items]


def found(job: Object, kind: str) -> Object:
    return next(one for one in job["status"]["conditions"] if one["type"] == kind)


async def test_a_node_that_is_not_heard_of_is_seen_at_its_pod_and_given_up_after_its_time(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        await begun(stage, runPolicy={"maxRestarts": 0, "lostNodeTimeoutSeconds": 300})
        await change(stage, "job-worker-1", conditions=[condition("Ready", False), condition("ContainersReady", True)])
        await stage.pass_time(200)
        assert (await stage.job())["status"]["attempt"] == 0
        await stage.pass_time(101)
        status = (await stage.job())["status"]
        assert (status["attempt"], status["restarts"], status["restartsTowardsMax"]) == (1, 1, 0)
        failure = status["failures"][-1]
        assert (failure["reason"], failure["node"]) == ("LostNode", "node-of-job-worker-1")
        await stage.pass_time(11)
        assert set(await stage.machines.pods()) == {"job-worker-0", "job-worker-1"}


async def test_why_a_hub_does_not_start_stands_at_the_job_until_it_runs_and_keeps_nobody(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        await begun(stage, analyzer={"enabled": True}, trace={"enabled": True})
        pull = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
        hub = {"name": "hub", "image": "none", "imageID": "", "ready": False, "restartCount": 0, "state": pull}
        unready = condition("Ready", False, reason="ContainersNotReady")
        await change(stage, "job-hub", phase="Pending", conditions=[unready], containerStatuses=[hub])
        await stage.rest(machines=False)
        job = await stage.job()
        assert job["status"]["phase"] == "Running"
        assert found(job, "HubReady")["status"] == "False" and "not found" in found(job, "HubReady")["message"]
        pull["waiting"]["reason"] = "ImagePullBackOff"
        await change(stage, "job-hub", containerStatuses=[hub])
        await stage.rest(machines=False)
        assert (await reasons(stage)).count("HubNotRunning") == 1
        await stage.rest()  # the machine starts it
        assert found(await stage.job(), "HubReady")["status"] == "True"


async def test_pods_whose_deletion_no_watch_reported_hold_no_restart_up(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with play(plane, namespace) as stage:
        await begun(stage)
        await stage.machines.end("job-worker-1", 42)
        await stage.look()
        await stage.reconcile()
        while await stage.machines.settle():
            pass
        assert await stage.machines.pods() == {}
        for _ in range(3):  # without a look: a watch that began again has not delivered the deletions
            stage.skipped_s += 40
            await stage.reconcile()
        assert {"job-worker-0", "job-worker-1"} <= set(await stage.machines.pods())


async def test_initializers_that_are_evicted_are_tried_again_outside_of_the_budget(
    plane: kube.ControlPlane, namespace: str
) -> None:
    one = {"name": "data", "image": "busybox", "storageUri": "s3://a/b", "target": "/data", "scope": "Job"}
    data = {"mock": True, "volume": {"claim": "data", "mountPath": "/data"}}
    async with play(plane, namespace) as stage:
        made = manifest(namespace, initializers=[one], data=data, runPolicy={"maxRestarts": 0})
        await stage.api.create(JOBS, made)
        await stage.begin()
        await stage.rest()
        first = (await stage.machines.pods())["job-init"]["metadata"]["uid"]
        await change(stage, "job-init", phase="Failed", reason="Evicted", message="low on memory", containerStatuses=[])
        await stage.rest()
        status = (await stage.job())["status"]
        assert (status["initRestarts"], status["failures"][-1]["reason"]) == (0, "Evicted")
        await stage.pass_time(11)
        pods = await stage.machines.pods()
        assert set(pods) == {"job-init"} and pods["job-init"]["metadata"]["uid"] != first
        await stage.machines.end("job-init", 0)
        await stage.rest()
        assert set(await stage.machines.pods()) >= {"job-worker-0", "job-worker-1"}
