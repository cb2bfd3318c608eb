"""Nodes that are to be emptied, as the API server describes them, and checkpoints as ranks report them."""

import dataclasses
from typing import Any

import pytest
import rendered

from megatronapp_common.job.api.status import Condition, ConditionType, Status
from megatronapp_common.names import (
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_REPLICA_INDEX,
    LABEL_REPLICA_TYPE,
    LABEL_SPARE,
)
from megatronapp_common.text.times import seconds_of
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.leaving_nodes import READ_S, SHARED_S, LeavingNodes, why_leaving
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord, read_pod
from megatronapp_operator.plan import GangSize, Phase
from megatronapp_operator.plan_io.hub_summary import read_checkpoint, read_progress


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"spec": {"taints": [{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]}}, None),
        ({"spec": {"unschedulable": True}}, "is cordoned"),
        ({"metadata": {"deletionTimestamp": "2026-01-02T03:04:05Z"}}, "is being deleted"),
        (
            {"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}},
            "is being removed by Cluster Autoscaler",
        ),
        (
            {"spec": {"unschedulable": True, "taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}},
            "is being removed by Karpenter",
        ),
    ],
)
def test_a_node_is_leaving_by_what_precedes_an_eviction(changes: dict[str, Any], why: str | None) -> None:
    assert why_leaving({"metadata": {}, "spec": {}} | changes) == why


def test_the_newest_checkpoint_of_a_progress_document_is_read() -> None:
    checkpoint = {"iteration": 20, "takenAt": "2026-01-02T03:04:05.900000Z", "pendingIteration": None}
    found = read_progress({"iteration": 23, "checkpoint": checkpoint})
    assert found is not None
    assert (found.checkpoint_iteration, found.checkpoint_time) == (20, seconds_of("2026-01-02T03:04:05Z"))


@pytest.mark.parametrize(
    "entry",
    [None, {}, 7, {"iteration": -1, "takenAt": "2026-01-02T03:04:05Z"},
     {"iteration": None, "takenAt": None}],
)  # fmt: skip
def test_a_checkpoint_without_step_is_none(entry: Any) -> None:
    assert read_checkpoint(entry) == (None, None)


@pytest.mark.parametrize(
    "entry", [{"iteration": 20}, {"iteration": 20, "takenAt": None}, {"iteration": 20, "takenAt": "soon"}]
)
def test_a_checkpoint_of_a_release_that_reports_no_time_has_its_step(entry: Any) -> None:
    assert read_checkpoint(entry) == (20, None)


class Nodes(KubernetesApi):
    """An API server with cordoned nodes, and the names of those that were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    async def get(self, resource: Any, namespace: str | None, name: str, *, timeout_s: float | None = None) -> Object:
        self.read.append(name)
        return {"metadata": {"name": name}, "spec": {"unschedulable": True}}


def gang(name: str, nodes: int, *, refused: bool) -> tuple[JobMemory, list[PodRecord]]:
    """Return a job whose gang trains, each worker on another node, and its pods."""
    saves = {"save": "/runs/a", "saveInterval": 100, "volume": {"claim": "runs", "mountPath": "/runs"}}
    condition = Condition(type=ConditionType.EVICTIONS_REFUSED, status=refused, reason="CheckpointOld", message="")
    status = Status(phase=Phase.RUNNING, running_time=1.0, conditions=(condition,))
    job = rendered.make_job({"runPolicy": {"disruption": "CheckpointFirst"}, "checkpoint": saves}, name=name)
    found = (read_pod(pod(name, index)) for index in range(nodes))
    pods = [record for record in found if record is not None]
    assert len(pods) == nodes
    return JobMemory(name, 1, job, status, {}, {}), pods


def pod(job: str, index: int, *, spare: bool = False) -> Object:
    labels = {
        LABEL_JOB: job,
        LABEL_JOB_UID: job,
        LABEL_REPLICA_TYPE: "worker",
        LABEL_REPLICA_INDEX: str(index),
        LABEL_ATTEMPT: "0",
    } | ({LABEL_SPARE: "true"} if spare else {})
    metadata = {"name": f"{job}-{index}", "namespace": "here", "uid": f"{job}-{index}", "resourceVersion": "1"}
    spec = {"containers": [{"name": "trainer"}], "nodeName": f"node-{job}-{index}"}
    more = {"creationTimestamp": "2026-01-02T03:04:05Z", "labels": labels, "ownerReferences": [{"uid": job}]}
    return {"kind": "Pod", "metadata": metadata | more, "spec": spec, "status": {}}


@pytest.mark.asyncio
async def test_nodes_are_read_only_while_evictions_are_refused() -> None:
    api, now = Nodes(), [0.0]
    reader = LeavingNodes(api, lambda: now[0], node_access=True)
    memory, pods = gang("a", 2, refused=False)
    assert await reader.read(memory, pods) is None and api.read == []
    memory.status = gang("a", 2, refused=True)[0].status
    assert await reader.read(memory, pods) == READ_S and api.read == ["node-a-0", "node-a-1"]
    assert [node.name for node in memory.leaving_nodes] == api.read
    now[0] += READ_S - 1
    assert await reader.read(memory, pods) == READ_S and len(api.read) == 2
    memory.status = gang("a", 2, refused=False)[0].status
    assert await reader.read(memory, pods) is None and memory.leaving_nodes == ()


@pytest.mark.asyncio
@pytest.mark.parametrize("disruption", ["Allow", "Protect", "CheckpointFirst"])
async def test_nodes_are_read_while_a_smaller_gang_may_grow(disruption: str) -> None:
    api = Nodes()
    memory, pods = gang("a", 2, refused=False)
    saves = {"save": "/runs/a", "saveInterval": 100, "volume": {"claim": "runs", "mountPath": "/runs"}}
    elastic = {"restart": "InPlace", "elastic": {"minData": 4}, "disruption": disruption}
    training = {"microBatchSize": 1, "globalBatchSize": 12, "trainIters": 4, "lr": 0.01}
    memory.spec_job = rendered.make_job(
        {"nodes": 3, "parallelism": {"data": 6}, "training": training, "checkpoint": saves, "runPolicy": elastic}
    )
    spare = read_pod(pod("a", 2, spare=True))
    assert spare is not None
    placed = [*pods, spare]
    for size, phase, seen, read in [
        (None, Phase.RUNNING, placed, False),
        (6, Phase.RUNNING, placed, False),
        (4, Phase.RUNNING, pods, False),
        (4, Phase.SUSPENDED, placed, False),
        (4, Phase.RUNNING, placed, True),
        (4, Phase.RESTARTING, placed, True),
    ]:
        api.read.clear()
        memory.nodes_again_at = float("-inf")
        gang_size = None if size is None else GangSize(data=size, since_attempt=1)
        memory.status = dataclasses.replace(memory.status, gang_size=gang_size, phase=phase)
        await LeavingNodes(api, lambda: 0.0, node_access=True).read(memory, seen)
        assert api.read == (["node-a-0", "node-a-1", "node-a-2"] if read else [])
        assert [node.name for node in memory.leaving_nodes] == api.read


@pytest.mark.asyncio
async def test_many_gangs_are_read_at_a_limited_rate() -> None:
    """Check that gangs are read in the order in which they were due, and each is read."""
    api, now, size, count = Nodes(), [0.0], 50, 20
    reader = LeavingNodes(api, lambda: now[0], node_access=True)
    gangs = [gang(f"g{number}", size, refused=True) for number in range(count)]
    rounds = [await reader.read(memory, pods) for memory, pods in gangs]
    assert rounds == [READ_S, *(pytest.approx(SHARED_S * size * number) for number in range(1, count))]
    assert len(api.read) == size
    for number in range(1, count):
        now[0] = rounds[number] or 0.0
        for memory, pods in gangs[number:]:
            await reader.read(memory, pods)
        assert len(api.read) == size * (number + 1)
    assert len(set(api.read)) == size * count
