"""Gangs under a real Kueue: queued, admitted, preempted, suspended, deleted, on machines that are lost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import kube
import kueue
import pytest
from operator_simulation import OperatorSimulation, manifest, simulated_operator
from queued_nodes import QueuedNodes

from megatronapp_operator.backends.kubernetes.client.resources import JOBS, PODS, WORKLOADS, Object

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600), pytest.mark.full("a real Kueue: minutes")]
DEADLINE_S = 120.0
QUEUE = "team"
LOST_S = 300
"""runPolicy.lostNodeTimeoutSeconds, by default."""


def queued_job(namespace: str, name: str = "job", **spec: Any) -> Object:
    """A job of two workers, each with a CPU of the queue."""
    queued = {"scheduling": {"gang": "Kueue", "queue": QUEUE}, "resources": {"requests": {"cpu": "1"}}}
    return manifest(namespace, name, **queued | spec)


@contextlib.asynccontextmanager
async def stage_of(plane: kube.ControlPlane, namespace: str, *, cpus: int) -> AsyncIterator[OperatorSimulation]:
    """Start an operator, machines, and a queue with this number of CPUs."""
    kueue.queue(plane, namespace, QUEUE, cpus=cpus)
    async with simulated_operator(plane, namespace) as stage:
        stage.nodes = QueuedNodes(stage.nodes.api, namespace, stage.nodes.client)
        stage.clock = time.time  # Kueue's
        await stage.begin()
        yield stage


async def until(stage: OperatorSimulation, condition: Callable[[], Awaitable[Any]]) -> None:
    """Let operator, machines and Kueue act until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        await stage.rest()
        if await condition():
            return
        assert time.monotonic() < deadline, await state(stage)
        await asyncio.sleep(0.05)


async def state(stage: OperatorSimulation) -> list[Any]:
    """Return the state to show of a test that waits in vain."""
    pods = (await stage.nodes.pods()).values()
    jobs = await stage.nodes.api.list_objects(JOBS, stage.namespace)
    shown = ("name", "deletionTimestamp", "finalizers")
    return [
        *({name: pod["metadata"].get(name) for name in shown} | {"phase": pod["status"]["phase"]} for pod in pods),
        *(item.get("status") for item in jobs.items),
        *(await workloads(stage)).items(),
    ]


async def workloads(stage: OperatorSimulation) -> dict[str, Object]:
    listing = await stage.nodes.api.list_objects(WORKLOADS, stage.namespace)
    return {item["metadata"]["name"]: item for item in listing.items}


def group(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"])


def runs(stage: OperatorSimulation, name: str = "job", attempt: int = 0) -> Callable[[], Awaitable[bool]]:
    """Return a check whether all workers of this attempt run."""

    async def is_met() -> bool:
        pods = [pod for pod in (await stage.nodes.pods()).values() if group(pod) == f"{name}-a{attempt}"]
        return len(pods) == 2 and all(pod["status"]["phase"] == "Running" for pod in pods)

    return is_met


def queued(stage: OperatorSimulation, attempt: int = 0, *, placed: int = 0) -> Callable[[], Awaitable[bool]]:
    """Return a check whether a workload exists for the attempt, and this number of its workers run."""

    async def is_met() -> bool:
        pods = [pod for pod in (await stage.nodes.pods()).values() if group(pod) == f"job-a{attempt}"]
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        return len(pods) == 2 and len(running) == placed and f"job-a{attempt}" in await workloads(stage)

    return is_met


async def patch(stage: OperatorSimulation, name: str, **spec: Any) -> None:
    path = f"{JOBS.path(stage.namespace, name)}"
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = await stage.nodes.client.patch(path, json={"spec": spec}, headers=headers)
    assert answer.is_success, answer.text


async def test_a_gang_waits_for_its_quota_without_a_deadline_and_runs_to_its_end(
    queued_plane: kube.ControlPlane, namespace: str
) -> None:
    async with stage_of(queued_plane, namespace, cpus=1) as stage:
        await stage.api.create(JOBS, queued_job(namespace, runPolicy={"activeDeadlineSeconds": 3600}))
        await until(stage, queued(stage))
        await stage.pass_time(7200)
        assert (await stage.job())["status"]["phase"] == "Queued"
        kueue.queue(queued_plane, namespace, QUEUE, cpus=2)
        await until(stage, runs(stage))
        stage.report_progress("job")
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Running"
        for name in await stage.nodes.pods():
            await stage.nodes.end(name, 0)

        async def finished() -> bool:
            conditions = (await workloads(stage))["job-a0"]["status"]["conditions"]
            return any(condition["type"] == "Finished" and condition["status"] == "True" for condition in conditions)

        await until(stage, finished)
        assert (await stage.job())["status"]["phase"] == "Succeeded"
        assert len(await stage.nodes.pods()) == 2


@pytest.mark.parametrize("placed", [0, 1], ids=["queued", "half-placed"])
async def test_a_gang_that_is_not_whole_is_suspended_and_resumed(
    queued_plane: kube.ControlPlane, namespace: str, placed: int
) -> None:
    """Run without the cluster's collector of pods, which needs up to 20 s for those without a machine."""
    async with stage_of(queued_plane, namespace, cpus=2 * placed) as stage:
        assert isinstance(stage.nodes, QueuedNodes)
        stage.nodes.full = frozenset({"job-worker-1"})
        await stage.api.create(JOBS, queued_job(namespace))
        await until(stage, queued(stage, placed=placed))
        await patch(stage, "job", suspend=True)

        async def deleted() -> bool:
            return not await stage.nodes.pods() and not await workloads(stage)

        await until(stage, deleted)
        assert (await stage.job())["status"]["phase"] == "Suspended"
        stage.nodes.full = frozenset()
        kueue.queue(queued_plane, namespace, QUEUE, cpus=2)
        await patch(stage, "job", suspend=False)
        await until(stage, runs(stage, attempt=1))


async def test_a_gang_with_a_lost_node_is_restarted(queued_plane: kube.ControlPlane, namespace: str) -> None:
    async with stage_of(queued_plane, namespace, cpus=2) as stage:
        assert isinstance(stage.nodes, QueuedNodes)
        await stage.api.create(JOBS, queued_job(namespace))
        await until(stage, runs(stage))
        pod = (await stage.nodes.pods())["job-worker-1"]
        stage.nodes.lost = frozenset({pod["metadata"]["uid"]})
        await stage.nodes.api.delete(PODS, pod)  # as the cluster does after its five minutes
        for _ in range(4):  # given up, stopped, killed
            await stage.pass_time(LOST_S + 60)
        await until(stage, runs(stage, attempt=1))
        status = (await stage.job())["status"]
    assert (status["restarts"], status["restartsTowardsMax"]) == (1, 0)


async def test_a_preempted_gang_is_restarted_outside_of_the_budget(
    queued_plane: kube.ControlPlane, namespace: str
) -> None:
    urgent: Object = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": namespace}}
    done = queued_plane.kubectl("create", "-f", "-", stdin=urgent | {"value": 1000})
    assert done.returncode == 0, done.stderr
    async with stage_of(queued_plane, namespace, cpus=2) as stage:
        await stage.api.create(JOBS, queued_job(namespace, runPolicy={"maxRestarts": 0}))
        await until(stage, runs(stage))
        stage.report_progress("job")
        await stage.rest()
        await stage.api.create(JOBS, queued_job(namespace, "urgent", priorityClassName=namespace))
        await until(stage, runs(stage, "urgent"))
        await stage.pass_time(60)
        await until(stage, queued(stage, attempt=1))
        status = (await stage.job())["status"]
        assert status["phase"] == "Restarting"
        assert status["failures"][-1]["reason"] == "WorkloadEvictedDueToPreempted"
        assert status["failures"][-1]["action"] == "RestartJobIgnoreMax"
        for name, pod in (await stage.nodes.pods()).items():
            if group(pod) == "urgent-a0":
                await stage.nodes.end(name, 0)
        await until(stage, runs(stage, attempt=1))


async def test_the_log_of_a_worker_that_failed_stays(queued_plane: kube.ControlPlane, namespace: str) -> None:
    async with stage_of(queued_plane, namespace, cpus=2) as stage:
        await stage.api.create(JOBS, queued_job(namespace, runPolicy={"maxRestarts": 0}))
        await until(stage, runs(stage))
        stage.report_progress("job")
        await stage.rest()
        await stage.nodes.end("job-worker-0", 1)

        async def failed() -> bool:
            return bool((await stage.job())["status"]["phase"] == "Failed")

        await until(stage, failed)
        assert set(await stage.nodes.pods()) == {"job-worker-0"}


@pytest.mark.usefixtures("collectors")
@pytest.mark.parametrize("placed", [0, 1], ids=["queued", "half-placed"])
@pytest.mark.parametrize("how", ["Background", "Foreground"])
async def test_a_job_that_is_not_whole_is_deleted_and_another_takes_its_name(
    queued_plane: kube.ControlPlane, namespace: str, placed: int, how: str
) -> None:
    """Check also background deletion, where the job is deleted before its operator could act."""
    async with stage_of(queued_plane, namespace, cpus=2 * placed) as stage:
        assert isinstance(stage.nodes, QueuedNodes)
        stage.nodes.full = frozenset({"job-worker-1"})
        await stage.api.create(JOBS, queued_job(namespace))
        await until(stage, queued(stage, placed=placed))
        before = {pod["metadata"]["uid"] for pod in (await stage.nodes.pods()).values()}
        path, body = JOBS.path(namespace, "job"), {"propagationPolicy": how}
        answer = await stage.nodes.client.request("DELETE", path, json=body)
        assert answer.is_success, answer.text

        async def deleted() -> bool:
            pods = {pod["metadata"]["uid"] for pod in (await stage.nodes.pods()).values()}
            return not pods & before and await stage.nodes.api.get(JOBS, namespace, "job") is None

        await until(stage, deleted)
        stage.nodes.full = frozenset()
        kueue.queue(queued_plane, namespace, QUEUE, cpus=2)
        await stage.api.create(JOBS, queued_job(namespace))
        await until(stage, runs(stage))
