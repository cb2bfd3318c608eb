"""Generated histories of a job on a real API server, while the operator's requests fail and the operator is killed.

`make test-full` plays 40; MEGATRONAPP_HISTORIES sets another number.
"""

import asyncio
import contextlib
import dataclasses
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import hypothesis.strategies as st
import kube
import pytest
from fake_nodes import FakeNodes
from hypothesis import Phase, given, note, settings
from operator_simulation import KillableApi, OperatorSimulation, manifest, refuse, simulated_operator

from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes.client.errors import ConflictError, UnavailableError
from megatronapp_operator.backends.kubernetes.client.resources import (
    CONFIG_MAPS,
    COSCHEDULING_POD_GROUPS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SECRETS,
    SERVICES,
    Object,
    Resource,
)

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.full("ten seconds each; test_operator_interruptions is in each run"),
]
EXAMPLES = int(os.environ.get("MEGATRONAPP_HISTORIES", "40"))
TTL_S = 400
EXCLUDING = 43
"""Exit code for which the job excludes the node."""
MAX_ROUNDS = 40
OWNED = (PODS, SERVICES, SECRETS, CONFIG_MAPS, NETWORK_POLICIES, COSCHEDULING_POD_GROUPS)
KEY = "job"


@pytest.fixture(scope="module")
def groups_known(plane: kube.ControlPlane) -> kube.ControlPlane:
    """The control plane with the pod groups of coscheduling."""
    plane.define(kube.ROOT / "tests" / "fixtures" / "kube" / "coscheduling-podgroups.yaml")
    return plane


@dataclasses.dataclass(slots=True)
class GangNodes(FakeNodes):
    """Nodes that check with each of their actions that only one gang exists."""

    async def pods(self) -> dict[str, Object]:
        found = await FakeNodes.pods(self)
        attempts = {worker["metadata"]["labels"]["megatronapp.io/attempt"] for worker in workers(found).values()}
        assert len(attempts) <= 1, f"two gangs at once: {sorted(workers(found))} of attempts {attempts}"
        return found


class FaultInjector:
    """Random failures of requests: refused, not sent, not answered, or the end of the operator."""

    def __init__(self, seed: int, rate: float) -> None:
        self._random, self._rate = random.Random(seed), rate

    def __call__(self, _number: int) -> str | None:
        if self._random.random() >= self._rate:
            return None
        kind = self._random.choice(("conflict", "throttled", "unavailable", "dropped", "lost", "before", "after"))
        refuse(kind)
        if kind == "dropped":
            raise UnavailableError("the connection was reset")
        return kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A job, what happens to it, and how often a request fails."""

    initializer: bool
    groups: bool
    steps: list[str]
    deleted: bool
    rate: float
    seed: int


async def end_worker(stage: OperatorSimulation, code: int) -> None:
    for name in list(running(await stage.nodes.pods()))[-1:]:
        await stage.nodes.end(name, code, message="boom")


async def end_all(stage: OperatorSimulation) -> None:
    for name in running(await stage.nodes.pods()):
        await stage.nodes.end(name, 0)


async def end_initializer(stage: OperatorSimulation, code: int) -> None:
    pods = await stage.nodes.pods()
    if "job-init" in pods and is_running(pods["job-init"]):
        await stage.nodes.end("job-init", code)


async def lose(stage: OperatorSimulation) -> None:
    for pod in list((await stage.nodes.pods()).values())[:1]:
        await stage.nodes.api.delete(PODS, pod, grace_s=0)


async def set_suspend(stage: OperatorSimulation, *, suspend: bool) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    path = JOBS.path(stage.namespace, KEY)
    answer = await stage.nodes.client.patch(path, json={"spec": {"suspend": suspend}}, headers=headers)
    assert answer.is_success or answer.status_code == 404, answer.text


STEPS: dict[str, Callable[[OperatorSimulation], Awaitable[None]]] = {
    "a worker fails": lambda stage: end_worker(stage, 42),
    "a node fails": lambda stage: end_worker(stage, EXCLUDING),
    "the gang ends": end_all,
    "the initializer ends": lambda stage: end_initializer(stage, 0),
    "the initializer fails": lambda stage: end_initializer(stage, 1),
    "a pod is lost": lose,
    "suspend": lambda stage: set_suspend(stage, suspend=True),
    "resume": lambda stage: set_suspend(stage, suspend=False),
    "a minute": lambda stage: stage.pass_time(60),
    "a new operator": lambda stage: stage.begin(),
}
STORIES = st.builds(
    Story,
    initializer=st.booleans(),
    groups=st.booleans(),
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=3, max_size=9),
    deleted=st.booleans(),
    rate=st.sampled_from((0.0, 0.05, 0.2)),
    seed=st.integers(0, 1 << 32),
)


@settings(max_examples=EXAMPLES, deadline=None, database=None, phases=(Phase.explicit, Phase.generate))
@given(story=STORIES)
def test_every_history_ends_and_leaves_nothing(groups_known: kube.ControlPlane, story: Story) -> None:
    namespace = groups_known.new_namespace("history")
    note(str(story))
    asyncio.run(played(groups_known, namespace, story))


async def played(plane: kube.ControlPlane, namespace: str, story: Story) -> None:
    async with simulated_operator(plane, namespace) as stage:
        stage.nodes = GangNodes(stage.nodes.api, namespace, stage.nodes.client, stage.now)
        others = await make_others(stage)
        await stage.nodes.api.create(JOBS, job_of(story, namespace))
        stage.api.kill_at = FaultInjector(story.seed, story.rate)
        await stage.begin()
        await continue_until_stable(stage)
        for step in story.steps:
            await STEPS[step](stage)
            await continue_until_stable(stage)
        stage.api.kill_at = KillableApi.kill_at
        if story.deleted:
            await delete(stage)
        else:
            await finish(stage)
        await collect_garbage(stage)
        await stage.rest()
        assert await everything(stage) == others


def job_of(story: Story, namespace: str) -> Object:
    rule = {"match": {"exitCodes": {"in": [EXCLUDING]}}, "action": "ExcludeNodeAndRestart"}
    policy = {"maxRestarts": 1000, "ttlSecondsAfterFinished": TTL_S, "rules": [rule]}
    spec: dict[str, Any] = {"runPolicy": policy, "analyzer": {"enabled": True}}
    if story.initializer:
        initializer = {"name": "data", "image": "busybox", "storageUri": "s3://a/b", "target": "/data", "scope": "Job"}
        volume = {"mock": True, "volume": {"claim": "data", "mountPath": "/data"}}
        spec |= {"initializers": [initializer], "data": volume}
    if story.groups:
        spec |= {"scheduling": {"gang": "Coscheduling"}, "resources": {"requests": {"cpu": "1"}}}
    return manifest(namespace, KEY, **spec)


async def continue_until_stable(stage: OperatorSimulation) -> None:
    """Rest; ranks that run report progress."""
    await stage.rest()
    if stage.reconciler.memory((stage.namespace, KEY)) is not None:
        stage.report_progress(KEY)
        await stage.rest()


async def delete(stage: OperatorSimulation) -> None:
    found = await stage.nodes.api.get(JOBS, stage.namespace, KEY)
    if found is not None:
        await stage.nodes.api.delete(JOBS, found)
    await stage.rest()
    assert await stage.nodes.api.get(JOBS, stage.namespace, KEY) is None


async def finish(stage: OperatorSimulation) -> None:
    """Let nothing fail any more: the job ends, and is deleted when its time is over."""
    await set_suspend(stage, suspend=False)
    for _ in range(MAX_ROUNDS):
        await continue_until_stable(stage)
        if await stage.nodes.api.get(JOBS, stage.namespace, KEY) is None:
            return
        await end_initializer(stage, 0)
        await end_all(stage)
        await stage.pass_time(60)
    raise AssertionError(f"the job is stuck: {(await stage.job())['status']}")


async def make_others(stage: OperatorSimulation) -> dict[tuple[str, str], str]:
    """Objects of another job, which are never touched."""
    metadata = {"namespace": stage.namespace, "labels": {LABEL_JOB_UID: "another"}}
    container = {"name": "trainer", "image": "none"}
    bodies: tuple[tuple[Resource, Object], ...] = (
        (PODS, {"metadata": metadata | {"name": "job-2-worker-0"}, "spec": {"containers": [container]}}),
        (SECRETS, {"metadata": metadata | {"name": "job-2-tokens"}}),
        (CONFIG_MAPS, {"metadata": metadata | {"name": "job-2-ranks"}}),
        (COSCHEDULING_POD_GROUPS, {"metadata": metadata | {"name": "job-2-a0"}, "spec": {"minMember": 1}}),
    )
    kinds = ("Pod", "Secret", "ConfigMap", "PodGroup")
    for kind, (resource, body) in zip(kinds, bodies, strict=True):
        await stage.nodes.api.create(resource, {"apiVersion": resource.api_version, "kind": kind} | body)
    return await everything(stage)


async def everything(stage: OperatorSimulation) -> dict[tuple[str, str], str]:
    """Kind, name and version of what there is."""
    return {
        (resource.plural, item["metadata"]["name"]): item["metadata"]["resourceVersion"]
        for resource in OWNED
        for item in (await stage.nodes.api.list_objects(resource, stage.namespace)).items
    }


async def collect_garbage(stage: OperatorSimulation) -> None:
    """Delete objects whose owner is deleted, as the controller of a whole cluster does."""
    for resource in OWNED:
        for item in (await stage.nodes.api.list_objects(resource, stage.namespace)).items:
            if item["metadata"].get("ownerReferences"):
                with contextlib.suppress(ConflictError):
                    await stage.nodes.api.delete(resource, item, grace_s=0)


def workers(pods: dict[str, Object]) -> dict[str, Object]:
    return {name: pod for name, pod in pods.items() if "-worker-" in name}


def running(pods: dict[str, Object]) -> dict[str, Object]:
    return {name: pod for name, pod in workers(pods).items() if is_running(pod)}


def is_running(pod: Object) -> bool:
    return pod["status"]["phase"] == "Running" and not pod["metadata"].get("deletionTimestamp")
