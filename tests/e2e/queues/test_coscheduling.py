"""Gangs under a real scheduler of scheduler-plugins: placed whole or not, restarted, deleted, kept off a node."""

import asyncio
import contextlib
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import coscheduling
import httpx
import kube
import kueue
import pytest
from coscheduling import ScheduledNodes
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import COSCHEDULING_POD_GROUPS, JOBS, PODS, Object

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600), pytest.mark.full("a real scheduler: minutes")]
DEADLINE_S = 120.0
BROKEN = 42
"""The exit code of a worker whose node is to be avoided."""


@pytest.fixture(scope="module")
def placing_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube.ControlPlane]:
    """A control plane with our definitions and this scheduler."""
    folder = tmp_path_factory.mktemp("control-plane")
    with kube.control_plane(folder, group=coscheduling.SERVER) as plane:
        plane.define(*sorted((kube.ROOT / "crds").glob("*.yaml")))
        with coscheduling.scheduler(plane, tmp_path_factory.mktemp("scheduler")):
            yield plane


@pytest.fixture
def namespace(placing_plane: kube.ControlPlane) -> str:
    return placing_plane.new_namespace("placed")


def gang(namespace: str, name: str = "job", **spec: Any) -> Object:
    """A job of two workers, each of which fills a node."""
    scheduling = {"scheduling": {"gang": "Coscheduling"}, "resources": {"requests": {"cpu": "1"}}}
    return manifest(namespace, name, **scheduling | spec)


@contextlib.asynccontextmanager
async def stage_of(plane: kube.ControlPlane, namespace: str) -> AsyncIterator[OperatorSimulation]:
    """An operator and machines; no pod stays, which would take room of the next test."""
    async with simulated_operator(plane, namespace) as stage:
        stage.nodes = ScheduledNodes(stage.nodes.api, namespace, stage.nodes.client)
        stage.clock = time.time  # the scheduler's
        await stage.begin()
        try:
            yield stage
        finally:
            answer = await stage.nodes.client.delete(PODS.path(namespace), params={"gracePeriodSeconds": 0})
            assert answer.is_success, answer.text


async def until(stage: OperatorSimulation, condition: Callable[[], Awaitable[bool]]) -> None:
    """Let operator, scheduler and machines act until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        await stage.rest()
        if await condition():
            return
        jobs = await stage.nodes.api.list_objects(JOBS, stage.namespace)
        assert time.monotonic() < deadline, [await stage.nodes.pods(), jobs.items]
        await asyncio.sleep(0.05)


async def workers(stage: OperatorSimulation, name: str = "job") -> list[Object]:
    return [
        pod_object
        for pod, pod_object in sorted((await stage.nodes.pods()).items())
        if pod.startswith(f"{name}-worker-")
    ]


async def placed(stage: OperatorSimulation, name: str = "job") -> list[str]:
    """The nodes of a job's workers, by name."""
    return sorted(worker["spec"]["nodeName"] for worker in await workers(stage, name) if worker["spec"].get("nodeName"))


async def groups(stage: OperatorSimulation) -> set[str]:
    listing = await stage.nodes.api.list_objects(COSCHEDULING_POD_GROUPS, stage.namespace)
    return {item["metadata"]["name"] for item in listing.items}


def runs(stage: OperatorSimulation, name: str = "job", attempt: int = 0) -> Callable[[], Awaitable[bool]]:
    """A condition: both workers of this attempt run."""

    async def is_met() -> bool:
        found = await workers(stage, name)
        of_attempt = {worker["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] for worker in found}
        running = [worker for worker in found if worker["status"]["phase"] == "Running"]
        return len(running) == 2 and of_attempt == {f"{name}-a{attempt}"}

    return is_met


def refused(stage: OperatorSimulation, name: str = "job", *, nodes: int) -> Callable[[], Awaitable[bool]]:
    """A condition: the scheduler has tried this many nodes for each worker and found no room, and the operator knows.

    Without the latter its deadlines could begin only after a time that a test lets pass.
    """

    async def is_met() -> bool:
        reasons = [
            str(condition.get("message"))
            for worker in await workers(stage, name)
            for condition in worker["status"].get("conditions", ())
            if condition["type"] == "PodScheduled" and condition["status"] == "False"
        ]
        job = await stage.nodes.api.get(JOBS, stage.namespace, name)
        is_known = job is not None and job["status"].get("unplacedTime") is not None
        is_refused = any(f"0/{nodes} nodes are available" in reason for reason in reasons) and len(reasons) == 2
        return is_known and is_refused

    return is_met


def touched(
    client: httpx.Client, namespace: str, group: str, condition: Callable[[], Awaitable[bool]]
) -> Callable[[], Awaitable[bool]]:
    """The condition; each time that it does not hold the scheduler tries the group again."""

    async def is_met() -> bool:
        holds = await condition()
        if not holds:
            coscheduling.touch(client, namespace, group)
        return holds

    return is_met


async def change(stage: OperatorSimulation, **spec: Any) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = await stage.nodes.client.patch(JOBS.path(stage.namespace, "job"), json={"spec": spec}, headers=headers)
    assert answer.is_success, answer.text


async def test_a_gang_without_capacity_for_all_takes_no_node_and_runs_later(
    placing_plane: kube.ControlPlane, namespace: str
) -> None:
    with coscheduling.nodes(placing_plane, "one", "two"), placing_plane.client() as client:
        async with stage_of(placing_plane, namespace) as stage:
            await stage.api.create(JOBS, gang(namespace))
            await until(stage, runs(stage))
            stage.report_progress("job")
            await stage.api.create(JOBS, gang(namespace, "second"))
            await until(stage, refused(stage, "second", nodes=2))
            coscheduling.add(client, "three")
            await until(stage, touched(client, namespace, "second-a0", refused(stage, "second", nodes=3)))
            assert await placed(stage, "second") == []
            assert await groups(stage) == {"job-a0", "second-a0"}
            for name in ("job-worker-0", "job-worker-1"):
                await stage.nodes.end(name, 0)
            await until(stage, touched(client, namespace, "second-a0", runs(stage, "second")))
            assert (await stage.job())["status"]["phase"] == "Succeeded"
            await stage.pass_time(3)
            assert await groups(stage) == {"second-a0"}


async def test_the_first_worker_gives_its_node_back_when_the_second_finds_none(
    placing_plane: kube.ControlPlane, namespace: str
) -> None:
    """The room is enough by its sum, so the scheduler tries; the other node takes no pods."""
    with coscheduling.nodes(placing_plane, "one", "two"), placing_plane.client() as client:
        coscheduling.close(client, "two", closed=True)
        async with stage_of(placing_plane, namespace) as stage:
            await stage.api.create(JOBS, gang(namespace))
            await until(stage, refused(stage, nodes=2))
            assert await placed(stage) == []
            await change(stage, suspend=True)
            await stage.rest()
            assert (await workers(stage), await groups(stage)) == ([], set())
            await change(stage, suspend=False)
            await until(stage, refused(stage, nodes=2))
            assert await groups(stage) == {"job-a1"}
            coscheduling.close(client, "two", closed=False)
            await until(stage, runs(stage, attempt=1))
            assert await placed(stage) == ["one", "two"]


@pytest.mark.parametrize("started", [0, 1], ids=["queued", "half-started"])
@pytest.mark.parametrize("how", ["Background", "Foreground"])
async def test_a_gang_that_is_not_whole_is_deleted_and_another_takes_its_name(
    placing_plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path, started: int, how: str
) -> None:
    with (
        kueue.collectors(placing_plane, tmp_path),
        coscheduling.nodes(placing_plane, "one", "two"),
        placing_plane.client() as client,
    ):
        coscheduling.close(client, "two", closed=not started)
        async with stage_of(placing_plane, namespace) as stage:
            assert isinstance(stage.nodes, ScheduledNodes)
            stage.nodes.full = frozenset({"job-worker-1"})
            await stage.api.create(JOBS, gang(namespace))

            async def half_started() -> bool:
                phases = [worker["status"]["phase"] for worker in await workers(stage)]
                return phases == ["Running", "Pending"] and len(await placed(stage)) == 2

            await until(stage, half_started if started else refused(stage, nodes=2))
            before = {worker["metadata"]["uid"] for worker in await workers(stage)}
            path, body = JOBS.path(namespace, "job"), {"propagationPolicy": how}
            answer = await stage.nodes.client.request("DELETE", path, json=body)
            assert answer.is_success, answer.text

            async def deleted() -> bool:
                uids = {worker["metadata"]["uid"] for worker in await workers(stage)}
                job = await stage.nodes.api.get(JOBS, namespace, "job")
                return not uids & before and job is None and not await groups(stage)

            await until(stage, deleted)
            stage.nodes.full = frozenset()
            coscheduling.close(client, "two", closed=False)
            await stage.api.create(JOBS, gang(namespace))
            await until(stage, runs(stage))


async def test_a_gang_stays_off_an_excluded_node_and_gets_it_back_after_its_time(
    placing_plane: kube.ControlPlane, namespace: str
) -> None:
    rule = {"match": {"exitCodes": {"in": [BROKEN]}}, "action": "ExcludeNodeAndRestart"}
    policy = {"rules": [rule], "nodeExclusion": {"ttlSeconds": 3600}, "startDeadlineSeconds": 600}
    with coscheduling.nodes(placing_plane, "one", "two", "three"), placing_plane.client() as client:
        async with stage_of(placing_plane, namespace) as stage:
            await stage.api.create(JOBS, gang(namespace, runPolicy=policy))
            await until(stage, runs(stage))
            stage.report_progress("job")
            await stage.rest()
            (culprit, _) = await workers(stage)
            excluded = str(culprit["spec"]["nodeName"])
            await stage.nodes.end("job-worker-0", BROKEN)
            await stage.rest()
            assert await groups(stage) == set()
            await stage.pass_time(11)
            await until(stage, runs(stage, attempt=1))
            others = sorted({"one", "two", "three"} - {excluded})
            assert (await placed(stage), await groups(stage)) == (others, {"job-a1"})
            stage.report_progress("job")
            await stage.rest()
            coscheduling.close(client, others[0], closed=True)
            await stage.nodes.end("job-worker-1", 1)
            await stage.pass_time(60)
            await until(stage, refused(stage, nodes=3))
            assert (await placed(stage), await groups(stage)) == ([], {"job-a2"})
            await stage.pass_time(3600)
            await until(stage, runs(stage, attempt=3))
            assert await placed(stage) == sorted({excluded, others[1]})
            assert await groups(stage) == {"job-a3"}
