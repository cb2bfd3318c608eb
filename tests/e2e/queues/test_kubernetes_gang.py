"""Gangs under Kubernetes' own scheduler with its feature GangScheduling: placed whole or not, restarted, with claims.

The devices are ResourceSlices that the test writes in place of a driver: scheduler and controller allocate them.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import coscheduling
import kube
import pytest
from coscheduling import ScheduledNodes
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import JOBS, KUBERNETES_POD_GROUPS, Object
from megatronapp_operator.controller.capabilities import find_pod_groups

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600), pytest.mark.full("a real scheduler: minutes")]
DEADLINE_S = 240.0
WORKLOADS = KUBERNETES_POD_GROUPS[2]
"""The kind of Kubernetes 1.35, whose API server and scheduler run here."""


@contextlib.contextmanager
def running(command: list[str], log: pathlib.Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        yield
        assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def gang_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube.ControlPlane]:
    """A control plane with our CRD, and the scheduler of Kubernetes with this feature."""
    folder = tmp_path_factory.mktemp("control-plane")
    flags = ("--feature-gates=GenericWorkload=true", "--runtime-config=scheduling.k8s.io/v1alpha1=true")
    with kube.control_plane(folder, group="cluster", flags=flags) as plane:
        plane.define(*sorted((kube.ROOT / "crds").glob("*.yaml")))
        scheduler = str(kube.programs("cluster") / "kube-scheduler")
        command = [scheduler, f"--kubeconfig={plane.kubeconfig()}", "--leader-elect=false", "--secure-port=0"]
        command.append("--feature-gates=GenericWorkload=true,GangScheduling=true")
        with running(command, folder / "scheduler.log"):
            yield plane


@contextlib.asynccontextmanager
async def operated(plane: kube.ControlPlane) -> AsyncIterator[OperatorSimulation]:
    """An operator, and machines that take what the scheduler has placed."""
    namespace = plane.new_namespace("gang")
    async with simulated_operator(plane, namespace, pod_groups=WORKLOADS) as stage:
        stage.nodes = ScheduledNodes(stage.nodes.api, namespace, stage.nodes.client)
        stage.clock = time.time  # the scheduler's
        await stage.begin()
        yield stage


def gang(namespace: str, name: str = "job") -> Object:
    """A job of two workers, each of which fills a node."""
    return manifest(namespace, name, scheduling={"gang": "Kubernetes"}, resources={"requests": {"cpu": "1"}})


async def until(stage: OperatorSimulation, condition: Callable[[], Awaitable[bool]]) -> None:
    """Let operator, scheduler and machines act until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        await stage.rest()
        if await condition():
            return
        assert time.monotonic() < deadline, await stage.nodes.pods()
        await asyncio.sleep(0.05)


async def workers(stage: OperatorSimulation, name: str = "job") -> list[Object]:
    pods = await stage.nodes.pods()
    return [pod for pod_name, pod in sorted(pods.items()) if pod_name.startswith(f"{name}-worker-")]


async def placed(stage: OperatorSimulation, name: str = "job") -> list[str]:
    return sorted(node for worker in await workers(stage, name) if (node := worker["spec"].get("nodeName")))


async def groups(stage: OperatorSimulation) -> set[str]:
    listing = await stage.nodes.api.list_objects(WORKLOADS, stage.namespace)
    return {item["metadata"]["name"] for item in listing.items}


def runs(stage: OperatorSimulation, name: str, attempt: int) -> Callable[[], Awaitable[bool]]:
    """Return the condition that both workers of this attempt run."""

    async def is_met() -> bool:
        found = await workers(stage, name)
        named = {worker["spec"]["workloadRef"]["name"] for worker in found}
        phases = [worker["status"]["phase"] for worker in found]
        return phases == ["Running", "Running"] and named == {f"{name}-a{attempt}"}

    return is_met


def tried(stage: OperatorSimulation, name: str) -> Callable[[], Awaitable[bool]]:
    """Return the condition that the scheduler has found no node for a worker of the job."""

    async def is_met() -> bool:
        return any(
            condition["type"] == "PodScheduled" and condition["status"] == "False"
            for worker in await workers(stage, name)
            for condition in worker["status"].get("conditions", ())
        )

    return is_met


async def test_a_gang_is_placed_whole_or_not_at_all_and_its_group_ends_with_the_attempt(
    gang_plane: kube.ControlPlane,
) -> None:
    with coscheduling.nodes(gang_plane, "one"), gang_plane.client() as client:
        async with operated(gang_plane) as stage:
            assert await find_pod_groups(stage.nodes.api) == WORKLOADS
            await stage.api.create(JOBS, gang(stage.namespace))
            await until(stage, tried(stage, "job"))
            assert (await placed(stage), await groups(stage)) == ([], {"job-a0"})
            coscheduling.add(client, "two")
            await until(stage, runs(stage, "job", 0))
            assert await placed(stage) == ["one", "two"]
            stage.report_progress("job")
            await stage.rest()
            await stage.nodes.end("job-worker-1", 42)
            await stage.rest()
            assert await groups(stage) == set()
            await stage.pass_time(11)
            await until(stage, runs(stage, "job", 1))
            assert await groups(stage) == {"job-a1"}
            for name in ("job-worker-0", "job-worker-1"):
                await stage.nodes.end(name, 0)
            await stage.rest()
            await stage.pass_time(3)
            assert (await stage.job())["status"]["phase"] == "Succeeded"
            assert await groups(stage) == set()


DRIVER = "gpu.example.com"
CLAIMED: Object = {
    "gpusPerNode": 4,
    "procPerNode": 4,
    "gpuResourceName": "resource.k8s.io/claims",
    "podTemplate": {
        "spec": {
            "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "four-gpus"}],
            "containers": [{"name": "trainer", "resources": {"claims": [{"name": "gpus"}]}}],
        }
    },
}
RESOURCES = "/apis/resource.k8s.io/v1"


def write_devices(plane: kube.ControlPlane, namespace: str) -> None:
    """Write the class of the devices, and the template of claims for four of them."""
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    plane.create(f"{RESOURCES}/deviceclasses", {"metadata": {"name": DRIVER}, "spec": {"selectors": [selector]}})
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER, "count": 4}}
    template = {"metadata": {"name": "four-gpus"}, "spec": {"spec": {"devices": {"requests": [request]}}}}
    plane.create(f"{RESOURCES}/namespaces/{namespace}/resourceclaimtemplates", template)


def write_slice(plane: kube.ControlPlane, node: str, gpus: int) -> None:
    """Write the devices of a node, as its driver does."""
    devices = [{"name": f"gpu-{number}"} for number in range(gpus)]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}
    plane.create(f"{RESOURCES}/resourceslices", {"metadata": {"name": node}, "spec": spec})


async def allocated(stage: OperatorSimulation) -> dict[str, int]:
    """Return the number of devices allocated to the claim of each pod."""
    answer = await stage.nodes.client.get(f"{RESOURCES}/namespaces/{stage.namespace}/resourceclaims")
    return {
        claim["metadata"]["ownerReferences"][0]["name"]: len(claim["status"]["allocation"]["devices"]["results"])
        for claim in answer.json()["items"]
        if "allocation" in claim.get("status", {})
    }


async def test_a_gang_whose_workers_claim_devices_waits_until_all_claims_can_be_allocated(
    gang_plane: kube.ControlPlane,
) -> None:
    with (
        kube.controller(gang_plane, "resourceclaim-controller"),
        coscheduling.nodes(gang_plane, "one", "two"),
        gang_plane.client() as client,
    ):
        async with operated(gang_plane) as stage:
            stage.settings = dataclasses.replace(stage.settings, resource_claims=True)
            await stage.begin()
            write_devices(gang_plane, stage.namespace)
            write_slice(gang_plane, "one", 4)
            write_slice(gang_plane, "two", 2)
            job = gang(stage.namespace)
            await stage.api.create(JOBS, job | {"spec": job["spec"] | CLAIMED})
            await until(stage, tried(stage, "job"))
            assert await placed(stage) == []
            write_slice(gang_plane, "three", 4)
            coscheduling.add(client, "three")
            await until(stage, runs(stage, "job", 0))
            assert await placed(stage) == ["one", "three"]
            assert await allocated(stage) == {"job-worker-0": 4, "job-worker-1": 4}
