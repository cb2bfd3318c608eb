"""Upgrade of the operator with jobs in every state, and the way back: a former build, then ours, then the former.

The former build and its definition are of this repository's history; both run as processes on one API server.
"""

import asyncio
import contextlib
import io
import pathlib
import re
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import kube
import pytest
from fake_launchers import NodesWithLaunchers, launcher, nodes_with_launchers
from operator_process import OperatorProcess, started
from operator_simulation import manifest

from megatronapp_operator.backends.kubernetes.client.resources import (
    EVENTS,
    JOBS,
    NETWORK_POLICIES,
    SERVICES,
    VOLCANO_POD_GROUPS,
    Object,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(900),
    pytest.mark.full("two builds of the operator, there and back: minutes"),
]
FORMER = "2115fd5ea80327a5949a0132820bd6f9df48d546"
"""Last build before pod groups were removed, keys were rotated and installations were distinguished."""
PARTS = ("operator/src", "common/src", "crds")
CRD = pathlib.Path("crds", "megatronjob.yaml")
NAMESPACE = "team"
FLAGS = ("--resync-seconds", "5")
LIMIT_S = 240.0
POLL_S = 0.3
LISTINGS = 2
"""So often an operator lists everything before it is judged by what it has left alone."""
LISTED = re.compile(r'megatron_operator_api_requests_total\{code="200",resource="pods",verb="GET"\}')
POLICY = {"runPolicy": {"backoff": {"initialSeconds": 1}}}
QUEUED: dict[str, Any] = {"scheduling": {"gang": "Volcano", "queue": "q"}, "resources": {"requests": {"cpu": "1"}}}


@pytest.fixture
def former(tmp_path: pathlib.Path) -> pathlib.Path:
    """The sources of the former build."""
    command = ["git", "-C", str(kube.ROOT), "archive", FORMER, *PARTS]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the history does not have {FORMER[:8]} (a shallow clone?): {done.stderr.decode().strip()}")
    folder = tmp_path / "former"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


class UpgradedCluster:
    """Jobs under one operator after the other."""

    def __init__(self, plane: kube.ControlPlane, nodes: NodesWithLaunchers, folder: pathlib.Path) -> None:
        self.plane, self.nodes, self._folder = plane, nodes, folder
        self._starts = 0

    @contextlib.asynccontextmanager
    async def operated(self, build: pathlib.Path | None) -> AsyncIterator[OperatorProcess]:
        """An operator and the definition of a build (None: ours), while pods are placed and started."""
        self._starts += 1
        path = (build or kube.ROOT) / CRD
        self.plane.define(path)
        sources = [] if build is None else [build / part for part in PARTS[:2]]
        name = f"operator-{self._starts}"
        with started(self.plane, self._folder, NAMESPACE, name, flags=FLAGS, sources=sources) as operator:
            await self.until(operator.leads, "it leads")
            yield operator
            operator.process.terminate()
            assert await asyncio.to_thread(operator.process.wait, LIMIT_S) == 0, operator.text()
            assert "Traceback" not in operator.text()

    async def until(self, condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        """Let machines do their part until something is so."""
        end = time.monotonic() + LIMIT_S
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            assert time.monotonic() < end, f"not within {LIMIT_S:g} s: {what}; {await self.phases()}"
            await self.nodes.settle()
            await asyncio.sleep(POLL_S)

    async def edit(self, name: str, **spec: Any) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        path = JOBS.path(NAMESPACE, name)
        answer = await self.nodes.client.patch(path, json={"spec": spec}, headers=headers)
        assert answer.is_success, answer.text

    async def phases(self) -> dict[str, tuple[str, int]]:
        """Phase and attempt of every job."""
        jobs = (await self.nodes.api.list_objects(JOBS, NAMESPACE)).items
        found = {job["metadata"]["name"]: job.get("status") or {} for job in jobs}
        return {name: (status.get("phase", ""), status.get("attempt", 0)) for name, status in found.items()}

    async def reach(self, **expected: tuple[str, int]) -> None:
        """Wait for these phases and attempts."""

        async def reached() -> bool:
            return (await self.phases()).items() >= expected.items()

        await self.until(reached, f"{expected}")

    async def picture(self) -> Object:
        """State that an upgrade must not change: uids of pods and of the objects around them, and states of jobs."""
        pods = await self.nodes.pods()
        around = {
            f"{resource.plural} {item['metadata']['name']}": item["metadata"]["uid"]
            for resource in (SERVICES, NETWORK_POLICIES)
            for item in (await self.nodes.api.list_objects(resource, NAMESPACE)).items
        }
        return {
            "pods": {name: pod["metadata"]["uid"] for name, pod in pods.items()},
            "leaving": [name for name, pod in pods.items() if "deletionTimestamp" in pod["metadata"]],
            "around": around,
            "phases": await self.phases(),
            "conditions": await self._conditions(),
        }

    async def _conditions(self) -> Object:
        jobs = (await self.nodes.api.list_objects(JOBS, NAMESPACE)).items
        return {
            job["metadata"]["name"]: {
                found["type"]: (found["status"], found["reason"]) for found in job["status"].get("conditions", ())
            }
            for job in jobs
        }

    async def warnings(self) -> list[str]:
        events = (await self.nodes.api.list_objects(EVENTS, NAMESPACE)).items
        return sorted(
            f"{event['regarding']['name']}: {event['note']}" for event in events if event["type"] == "Warning"
        )

    async def groups(self) -> set[str]:
        found = (await self.nodes.api.list_objects(VOLCANO_POD_GROUPS, NAMESPACE)).items
        return {group["metadata"]["name"] for group in found}

    async def rest(self, operator: OperatorProcess) -> None:
        """Wait until an operator has listed everything some times, with nothing left to do."""

        def lists() -> int:
            rows = [line for line in operator.metrics().splitlines() if LISTED.match(line)]
            return sum(int(float(row.rpartition(" ")[2])) for row in rows)

        before = lists()
        await self.until(lambda: lists() >= before + LISTINGS, "everything was listed again")


@pytest.fixture
def own_plane(tmp_path: pathlib.Path) -> Iterator[kube.ControlPlane]:
    """A control plane of this test alone, because it changes the definition."""
    folder = tmp_path / "plane"
    folder.mkdir()
    with kube.control_plane(folder) as plane:
        done = plane.kubectl("create", "namespace", NAMESPACE)
        assert done.returncode == 0, done.stderr
        plane.define(kube.ROOT / "tests" / "fixtures" / "kube" / "volcano-podgroups.yaml")
        yield plane


async def begin(cluster: UpgradedCluster, stack: contextlib.ExitStack) -> None:
    """A job in every state, by the operator that runs: two train, one waits in a queue, one is suspended, two ended."""
    nodes = cluster.nodes
    nodes.unplaced = {"queued"}
    for name, spec in {
        "gang": {},
        "again": QUEUED,
        "queued": QUEUED,
        "paused": {},
        "done": {},
        "broken": {"runPolicy": {"maxRestarts": 0}},
    }.items():
        job = await nodes.api.create(JOBS, manifest(NAMESPACE, name, **(POLICY | spec)))
        nodes.launchers[name] = stack.enter_context(launcher(job["metadata"]["uid"]))
        nodes.launchers[name].train(0)
    await cluster.reach(**{name: ("Running", 0) for name in ("gang", "again", "paused", "done", "broken")})
    await nodes.end("again-worker-1", 42, message="boom")
    nodes.launchers["again"].train(1)
    await cluster.edit("paused", suspend=True)
    for index in range(2):
        await nodes.end(f"done-worker-{index}", 0)
    await nodes.end("broken-worker-1", 42, message="boom")
    await cluster.reach(
        gang=("Running", 0),
        again=("Running", 1),
        queued=("Queued", 0),
        paused=("Suspended", 1),
        done=("Succeeded", 0),
        broken=("Failed", 0),
    )


async def finish(cluster: UpgradedCluster, gang: int, again: int) -> None:
    """All jobs end well by the operator that runs: the queue lets its job go, and the suspended one is resumed."""
    nodes = cluster.nodes
    nodes.unplaced = set()
    await cluster.reach(queued=("Running", 0))
    nodes.launchers["paused"].train(1)
    await cluster.edit("paused", suspend=False)
    await cluster.reach(paused=("Running", 1))
    await nodes.end("gang-worker-0", 42, message="boom")
    nodes.launchers["gang"].train(gang + 1)
    await cluster.reach(gang=("Running", gang + 1))
    for name in ("gang", "again", "queued", "paused"):
        for index in range(2):
            await nodes.end(f"{name}-worker-{index}", 0)
    await cluster.reach(
        gang=("Succeeded", gang + 1),
        again=("Succeeded", again),
        queued=("Succeeded", 0),
        paused=("Succeeded", 1),
        done=("Succeeded", 0),
        broken=("Failed", 0),
    )


async def test_an_upgrade_and_the_way_back_leave_jobs_alone(
    own_plane: kube.ControlPlane, former: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with contextlib.ExitStack() as stack:
        async with nodes_with_launchers(own_plane, NAMESPACE) as nodes:
            cluster = UpgradedCluster(own_plane, nodes, tmp_path)
            async with cluster.operated(former) as operator:
                await begin(cluster, stack)
                await cluster.rest(operator)
                before, warned = await cluster.picture(), await cluster.warnings()
                assert await cluster.groups() >= {"again-a0", "again-a1", "queued-a0"}
            async with cluster.operated(None) as operator:
                await cluster.rest(operator)
                assert await cluster.picture() == before
                assert await cluster.warnings() == warned

                async def removed() -> bool:
                    return await cluster.groups() == {"again-a1", "queued-a0"}

                await cluster.until(removed, "the group of the first attempt is removed")
            async with cluster.operated(former) as operator:
                await cluster.rest(operator)
                assert await cluster.picture() == before
                assert await cluster.warnings() == warned
            async with cluster.operated(None):
                await finish(cluster, 0, 1)

                async def none_left() -> bool:
                    return await cluster.groups() == set()

                await cluster.until(none_left, "all groups are removed")
            assert {
                name: job_launcher.refused for name, job_launcher in nodes.launchers.items() if job_launcher.refused
            } == {}
