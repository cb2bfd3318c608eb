"""Lives of jobs on a real API server: from the first look to the end, with failures on the way."""

import contextlib
import json
from typing import Any

import kube
import pytest
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError, NameTakenError
from megatronapp_operator.backends.kubernetes.client.resources import (
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SECRETS,
    SERVICES,
    Object,
    Resource,
)
from megatronapp_operator.backends.kubernetes.observe import PollResult

pytestmark = pytest.mark.asyncio
HUB: dict[str, Any] = {"analyzer": {"enabled": True}, "trace": {"enabled": True}}


async def begun(stage: OperatorSimulation, **spec: Any) -> Object:
    """A job whose pods run and train."""
    await stage.train(manifest(stage.namespace, **spec))
    return await stage.job()


async def names(stage: OperatorSimulation, resource: Resource) -> set[str]:
    listing = await stage.nodes.api.list_objects(resource, stage.namespace)
    return {item["metadata"]["name"] for item in listing.items}


async def reasons(stage: OperatorSimulation) -> list[str]:
    listing = await stage.nodes.api.list_objects(EVENTS, stage.namespace)
    return [item["reason"] for item in sorted(listing.items, key=lambda item: str(item["eventTime"]))]


def conditions(job: Object) -> dict[str, str]:
    return {condition["type"]: condition["status"] for condition in job["status"]["conditions"]}


async def test_a_job_is_started_watched_and_completed(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        job = await begun(stage, **HUB)
        assert job["status"]["phase"] == "Running" and job["status"]["worldSize"] == 2
        assert job["status"]["replicaStatuses"]["ready"] == 2
        assert job["status"]["pinned"]["trainerImage"] == "megatronapp/trainer:test"
        assert await names(stage, PODS) == {"job-hub", "job-worker-0", "job-worker-1"}
        assert await names(stage, SERVICES) == {"job-hub", "job-workers"}
        assert any(name.startswith("job-tokens-") for name in await names(stage, SECRETS)) and "job-job" in await names(
            stage, CONFIG_MAPS
        )
        for name in ("job-worker-0", "job-worker-1"):
            await stage.nodes.end(name, 0)
        await stage.rest()
        job = await stage.job()
        assert job["status"]["phase"] == "Succeeded" and conditions(job)["Complete"] == "True"
        assert await names(stage, PODS) == {"job-hub", "job-worker-0", "job-worker-1"}
        await stage.pass_time(301)
        assert "job-hub" not in await names(stage, PODS)
        reported = await reasons(stage)
    assert reported[0] == "GangCreated" and "Running" in reported and reported[-1] == "Completed"


async def test_a_failed_worker_restarts_the_gang_after_the_back_off(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        before = {name: pod["metadata"]["uid"] for name, pod in (await stage.nodes.pods()).items()}
        await stage.nodes.end("job-worker-1", 42, rank=1, message="boom")
        await stage.rest()
        job = await stage.job()
        assert (job["status"]["phase"], job["status"]["restarts"]) == ("Restarting", 1)
        failure = job["status"]["failures"][-1]
        assert (failure["worker"], failure["rank"], failure["exitCode"], failure["action"]) == (1, 1, 42, "RestartJob")
        assert failure["node"] == "node-of-job-worker-1"
        assert await names(stage, PODS) == set()
        await stage.pass_time(11)
        after = {name: pod["metadata"]["uid"] for name, pod in (await stage.nodes.pods()).items()}
        stage.report_progress("job")
        await stage.rest()
        job = await stage.job()
    assert after.keys() == before.keys() and not set(after.values()) & set(before.values())
    assert (job["status"]["phase"], job["status"]["attempt"]) == ("Running", 1)


async def test_a_new_operator_continues_where_the_previous_operator_stopped(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        pods, job = await names(stage, PODS), await stage.job()
        await stage.begin()
        await stage.rest()
        after = await stage.job()
        assert after["status"] == job["status"] and await names(stage, PODS) == pods
        assert (await stage.nodes.pods())["job-worker-0"]["metadata"].get("deletionTimestamp") is None


async def test_a_deleted_pod_is_a_preemption_and_costs_no_budget(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        await stage.nodes.api.delete(PODS, (await stage.nodes.pods())["job-worker-1"], grace_s=0)
        await stage.rest()
        await stage.pass_time(30)
        job = await stage.job()
    assert (job["status"]["attempt"], job["status"]["restarts"], job["status"]["restartsTowardsMax"]) == (1, 1, 0)


async def test_suspend_removes_the_pods_and_resume_brings_new_ones(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        plane.kubectl("patch", "mgj", "job", "-n", namespace, "--type=merge", "-p", '{"spec": {"suspend": true}}')
        await stage.rest()
        job = await stage.job()
        assert job["status"]["phase"] == "Suspended" and await names(stage, PODS) == set()
        plane.kubectl("patch", "mgj", "job", "-n", namespace, "--type=merge", "-p", '{"spec": {"suspend": false}}')
        await stage.rest()
        pods = await stage.nodes.pods()
    assert {pod["metadata"]["labels"]["megatronapp.io/attempt"] for pod in pods.values()} == {"1"}


async def test_a_pod_that_can_never_be_accepted_fails_the_job_with_the_reason(
    plane: kube.ControlPlane, namespace: str
) -> None:
    plane.restrict(namespace)
    async with simulated_operator(plane, namespace) as stage:
        network = {"mode": "HostNetwork", "policy": "None"}
        await stage.api.create(JOBS, manifest(namespace, network=network))
        await stage.begin()
        await stage.rest()
        job = await stage.job()
        assert await names(stage, PODS) == set()
    assert job["status"]["phase"] == "Failed"
    failed = next(condition for condition in job["status"]["conditions"] if condition["type"] == "Failed")
    assert "violates PodSecurity" in failed["message"] and "hostNetwork" in failed["message"]


async def test_a_quota_releases_the_whole_gang_and_lets_it_try_again(plane: kube.ControlPlane, namespace: str) -> None:
    plane.set_quota(namespace, {"pods": "1"})
    async with simulated_operator(plane, namespace) as stage:
        await stage.api.create(JOBS, manifest(namespace))
        await stage.begin()
        with contextlib.suppress(AssertionError):
            await stage.rest(with_nodes=False)
        job = await stage.job()
        assert await names(stage, PODS) == set()
        assert job["status"]["phase"] in {"Pending", "Queued"} and job["status"]["restarts"] == 0
        scheduled = next(condition for condition in job["status"]["conditions"] if condition["type"] == "PodsScheduled")
        assert scheduled["reason"] == "QuotaExceeded" and scheduled["status"] == "False"
        plane.remove_quota(namespace)
        await stage.pass_time(3600)
        pods = await names(stage, PODS)
    assert pods == {"job-worker-0", "job-worker-1"}


async def test_workers_get_their_rack_and_a_long_rank_table_is_a_config_map(
    plane: kube.ControlPlane, namespace: str
) -> None:
    for index, rack in enumerate(("r2", None)):
        labels = {} if rack is None else {"example.com/rack": rack}
        meta = {"name": f"node-of-{namespace}-worker-{index}", "labels": labels}
        assert (
            plane.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Node", "metadata": meta}).returncode
            == 0
        )
    async with simulated_operator(plane, namespace, node_access=True) as stage:
        network = {"rankOrder": "Topology", "topologyKey": "example.com/rack"}
        await stage.api.create(JOBS, manifest(namespace, namespace, network=network))
        await stage.begin()
        await stage.rest()
        pods = (await stage.nodes.pods()).values()
        racks = sorted(pod["metadata"]["annotations"]["megatronapp.io/topology"] for pod in pods)
        assert racks == ["-", "r2"]
        workers = [{"index": index, "address": "10.0.0.1", "node": "n", "ranks": [index]} for index in range(33)]
        memory = stage.reconciler.memory((namespace, namespace))
        assert memory is not None
        memory.poll_result = PollResult(rank_table={"attempt": 0, "digest": "d", "workers": workers})
        await stage.rest()
        table = (await stage.job(namespace))["status"]["rankTable"]
        assert table == {"attempt": 0, "digest": "d", "ref": f"{namespace}-ranks"}
        stored = await stage.nodes.api.get(CONFIG_MAPS, namespace, f"{namespace}-ranks")
        assert stored is not None and json.loads(stored["data"]["rank-table.json"])["workers"] == workers


async def test_volume_claims_that_not_all_workers_can_mount_are_named_before_the_gang(
    plane: kube.ControlPlane, namespace: str
) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    meta = {"name": "once", "namespace": namespace}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
    assert plane.kubectl("create", "-f", "-", stdin=claim).returncode == 0
    checkpoint = {"save": "/checkpoints", "saveInterval": 1, "volume": {"claim": "once", "mountPath": "/checkpoints"}}
    data = {"mock": True, "volume": {"claim": "absent", "mountPath": "/data"}}
    async with simulated_operator(plane, namespace) as stage:
        await stage.api.create(JOBS, manifest(namespace, checkpoint=checkpoint, data=data))
        await stage.begin()
        await stage.rest()
        job = await stage.job()
        reported = await reasons(stage)
    shared = next(condition for condition in job["status"]["conditions"] if condition["type"] == "VolumesShared")
    assert shared["status"] == "False" and reported.count("VolumesUnfit") == 1
    assert "absent does not exist" in shared["message"] and "once is ReadWriteOnce" in shared["message"]


async def test_a_job_is_suspended_while_its_volume_claims_cannot_be_read(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"mock": True, "volume": {"claim": "corpus", "mountPath": "/data"}}
    async with simulated_operator(plane, namespace) as stage:
        get = stage.api.get

        async def refusing(resource: Resource, *arguments: Any, **options: Any) -> Object | None:
            if resource is PERSISTENT_VOLUME_CLAIMS:
                raise ForbiddenError("persistentvolumeclaims is forbidden", status=403)
            return await get(resource, *arguments, **options)

        await begun(stage, data=data)
        monkeypatch.setattr(stage.api, "get", refusing)
        plane.kubectl("patch", "mgj", "job", "-n", namespace, "--type=merge", "-p", '{"spec": {"suspend": true}}')
        await stage.rest()
        job = await stage.job()
        assert job["status"]["phase"] == "Suspended" and await names(stage, PODS) == set()
        shared = next(condition for condition in job["status"]["conditions"] if condition["type"] == "VolumesShared")
        assert "cannot be read: persistentvolumeclaims is forbidden" in shared["message"]
        assert (await reasons(stage)).count("VolumesUnfit") == 2, "absent, then unknown: each is reported once"
        monkeypatch.undo()
        stage.skipped_s += 61
        await stage.rest()
        job = await stage.job()
        shared = next(condition for condition in job["status"]["conditions"] if condition["type"] == "VolumesShared")
        assert "corpus does not exist" in shared["message"]


async def test_a_stranger_in_the_way_is_named_and_left_alone(plane: kube.ControlPlane, namespace: str) -> None:
    spec = {"containers": [{"name": "main", "image": "none"}]}
    meta = {"name": "job-worker-1", "namespace": namespace}
    stranger = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    assert plane.kubectl("create", "-f", "-", stdin=stranger).returncode == 0
    async with simulated_operator(plane, namespace) as stage:
        await stage.api.create(JOBS, manifest(namespace))
        await stage.begin()
        with pytest.raises(Exception, match="job-worker-1 exists and belongs to another owner"):
            await stage.reconcile()
        pods = (await stage.nodes.api.list_objects(PODS, namespace)).items
    assert sorted(pod["metadata"]["name"] for pod in pods) == ["job-worker-0", "job-worker-1"]


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "NetworkPolicy"])
async def test_what_belongs_to_others_is_not_taken_over(plane: kube.ControlPlane, namespace: str, kind: str) -> None:
    bodies: dict[str, tuple[str, str, dict[str, Any]]] = {
        "Service": ("v1", "job-workers", {"spec": {"selector": {"app": "shop"}, "ports": [{"port": 80}]}}),
        "ConfigMap": ("v1", "job-job", {"data": {"mine": "yes"}}),
        "NetworkPolicy": ("networking.k8s.io/v1", "job-workers", {"spec": {"podSelector": {}}}),
    }
    version, name, body = bodies[kind]
    stranger = {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}, **body}
    assert plane.kubectl("create", "-f", "-", stdin=stranger).returncode == 0
    read = ("get", kind, name, "-n", namespace, "-o", "yaml")
    before = plane.kubectl(*read).stdout
    async with simulated_operator(plane, namespace) as stage:
        await stage.api.create(JOBS, manifest(namespace, **HUB))
        await stage.begin()
        with pytest.raises(
            NameTakenError, match=f"{kind.lower()[:-1]}.* {namespace}/{name} exists and belongs to another owner"
        ):
            await stage.reconcile()
        pods = (await stage.nodes.api.list_objects(PODS, namespace)).items
    assert (plane.kubectl(*read).stdout, pods) == (before, [])


async def test_a_stranger_in_the_place_of_the_hub_does_not_keep_the_gang(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatronapp_operator.backends.kubernetes.execution.executor.HUB_SHORT_PAUSE_S", 0.0)
    spec = {"selector": {"app": "shop"}, "ports": [{"port": 80}]}
    stranger = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "job-hub", "namespace": namespace}}
    assert plane.kubectl("create", "-f", "-", stdin=stranger | {"spec": spec}).returncode == 0
    async with simulated_operator(plane, namespace) as stage:
        await stage.api.create(JOBS, manifest(namespace, **HUB))
        await stage.begin()
        await stage.rest()
        reported, job = await reasons(stage), await stage.job()
    assert reported.count("HubRefused") == 1
    assert job["status"]["phase"] in {"Starting", "Running"}
