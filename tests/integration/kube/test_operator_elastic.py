"""A gang that gets smaller and whole again on a real API server, with nodes that are missing for a while."""

import dataclasses
from typing import Any

import kube
import pytest
from fake_nodes import FakeNodes
from operator_simulation import OperatorSimulation, cordoned_node, manifest, simulated_operator

from megatronapp_common.names import ANNOTATION_RESTART, Env, ExitCode
from megatronapp_operator.backends.kubernetes.client.resources import PODS, Object
from megatronapp_operator.backends.kubernetes.leaving_nodes import READ_S
from megatronapp_operator.backends.kubernetes.observe import PollResult, ReportedEnd
from megatronapp_operator.plan import Progress, WorkerOutcome
from megatronapp_operator.plan.policies.spares import CHECKED_S, PAUSE_S

pytestmark = pytest.mark.asyncio
ELASTIC: dict[str, Any] = {
    "nodes": 3,
    "parallelism": {"data": 3},
    "training": {"microBatchSize": 1, "globalBatchSize": 6, "trainIters": 4, "lr": 0.01},
    "checkpoint": {
        "save": "/checkpoints/run",
        "saveInterval": 2,
        "volume": {"claim": "runs", "mountPath": "/checkpoints"},
    },
    "analyzer": {"enabled": False},
    "runPolicy": {"restart": "InPlace", "elastic": {"minData": 2}},
}


@dataclasses.dataclass(slots=True)
class FewNodes(FakeNodes):
    """A scheduler that places as many pods as there are nodes, in the order of their names."""

    number: int = 3

    async def settle(self) -> bool:
        changed, used = False, 0
        for pod in (await self.pods()).values():
            ends = pod["metadata"].get("deletionTimestamp") is not None
            if ends:
                await self.api.delete(PODS, pod, grace_s=0)
            changed |= ends
            used += bool(pod["spec"].get("nodeName")) and pod["status"]["phase"] == "Running" and not ends
        for pod in (await self.pods()).values():
            waits = pod["status"]["phase"] == "Pending" and pod["metadata"].get("deletionTimestamp") is None
            known = any(condition["type"] == "PodScheduled" for condition in pod["status"].get("conditions", ()))
            if waits and used < self.number:
                await self.start(pod)
                used, changed = used + 1, True
            elif waits and not known:
                no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
                await self._send("PATCH", f"{pod['metadata']['name']}/status", {"status": {"conditions": [no]}})
                changed = True
        return changed


def workers_known(pod: Object) -> str | None:
    """Return the number of workers that a pod knows."""
    environment = pod["spec"]["containers"][0]["env"]
    return next((str(entry["value"]) for entry in environment if entry["name"] == Env.NUM_WORKERS), None)


async def sizes(stage: OperatorSimulation) -> dict[str, str | None]:
    """Return the worker pods, each with the number of workers that it knows."""
    return {name: workers_known(pod) for name, pod in (await stage.nodes.pods()).items()}


async def end_ranks(stage: OperatorSimulation, attempt: int, code: int, *workers: int) -> None:
    """Let the launcher of worker 0 report how ranks have ended; the launchers wait for the next attempt."""
    memory = stage.reconciler.memory((stage.namespace, "job"))
    assert memory is not None
    outcome = WorkerOutcome(code=code, reason="RankFailed", message="boom")
    ends = {index: ReportedEnd(attempt=attempt, outcome=outcome, finished_at=stage.now()) for index in workers}
    page = Progress(attempt=attempt, iteration=2)
    memory.poll_result = PollResult(progress=page, launcher_attempt=attempt, ends=ends, received_at=stage.now())
    await stage.rest()


async def reduce_gang(stage: OperatorSimulation) -> FewNodes:
    """Start a job of three workers, and lose a node for good; two workers train on."""
    await stage.train(manifest(stage.namespace, **ELASTIC))
    nodes = FewNodes(stage.nodes.api, stage.namespace, stage.nodes.client, clock=stage.now, number=2)
    stage.nodes = nodes
    await nodes.end("job-worker-2", 137)
    await end_ranks(stage, 0, ExitCode.PEER_LOST, 0, 1)
    await stage.pass_time(11)
    status = (await stage.job())["status"]
    assert (status["attempt"], status["worldSize"], status.get("gangSize")) == (1, 3, None)
    await stage.pass_time(301)
    stage.report_progress("job")
    await stage.rest()
    return nodes


async def test_a_gang_trains_on_with_the_nodes_that_are_left_and_grows_once_all_are_back(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace, node_access=True) as stage:
        nodes = await reduce_gang(stage)
        assert await sizes(stage) == {"job-worker-0": "2", "job-worker-1": "2", "job-spare-0-2": "2"}
        status = (await stage.job())["status"]
        assert (status["phase"], status["attempt"]) == ("Running", 2)
        assert status["gangSize"] == {"data": 2, "sinceAttempt": 2}
        assert (status["worldSize"], status["dataParallelSize"], status["replicaStatuses"]["desired"]) == (2, 2, 2)
        reduced = next(entry for entry in status["conditions"] if entry["type"] == "DataParallelReduced")
        assert (reduced["status"], reduced["reason"]) == ("True", "NodesMissing")
        assert reduced["message"].endswith("nodes for 0 of 1 absent worker; no node fits job-spare-0-2")
        assert (status["restarts"], status["restartsTowardsMax"]) == (1, 1)
        nodes.number = 3
        await stage.rest()
        assert ANNOTATION_RESTART not in (await nodes.pods())["job-worker-0"]["metadata"]["annotations"]
        async with cordoned_node(stage, "node-of-job-spare-0-2"):
            await stage.pass_time(CHECKED_S)
            status = (await stage.job())["status"]
            reduced = next(entry for entry in status["conditions"] if entry["type"] == "DataParallelReduced")
            assert reduced["message"].endswith("node node-of-job-spare-0-2 is cordoned and does not count")
            assert ANNOTATION_RESTART not in (await nodes.pods())["job-worker-0"]["metadata"]["annotations"]
        await stage.pass_time(READ_S)
        order = (await nodes.pods())["job-worker-0"]["metadata"]["annotations"][ANNOTATION_RESTART]
        assert order.split()[0] == "2" and order.endswith(" checkpoint")
        await nodes.end("job-spare-0-2", 137)
        await stage.rest()
        order = (await nodes.pods())["job-worker-0"]["metadata"]["annotations"][ANNOTATION_RESTART]
        assert order.split()[0] == "2" and order.endswith(" continue"), "the gang would not grow"
        await stage.pass_time(PAUSE_S)
        await stage.pass_time(CHECKED_S)
        order = (await nodes.pods())["job-worker-0"]["metadata"]["annotations"][ANNOTATION_RESTART]
        assert order.split()[0] == "2" and order.endswith(" checkpoint"), "another spare has the node"
        await end_ranks(stage, 2, ExitCode.PREEMPTED, 0, 1)
        stage.report_progress("job")
        await stage.rest()
        assert await sizes(stage) == {f"job-worker-{index}": "3" for index in range(3)}
        status = (await stage.job())["status"]
        assert (status["phase"], status["attempt"], status["dataParallelSize"]) == ("Running", 3, 3)
        assert status["gangSize"] == {"data": 3, "sinceAttempt": 3}
        whole = next(entry for entry in status["conditions"] if entry["type"] == "DataParallelReduced")
        assert (whole["status"], whole["reason"]) == ("False", "FullSize")
        assert (status["restarts"], status["restartsTowardsMax"]) == (1, 1)


@pytest.mark.full("more places of one run", but=("after-3",))
@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("when", ["before", "after", "lost"])
async def test_operators_that_end_while_the_gang_gets_smaller_make_it_of_equal_pods(
    plane: kube.ControlPlane, namespace: str, when: str, place: int
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await stage.train(manifest(stage.namespace, **ELASTIC))
        stage.nodes = FewNodes(stage.nodes.api, stage.namespace, stage.nodes.client, clock=stage.now, number=2)
        await stage.nodes.end("job-worker-2", 137)
        await end_ranks(stage, 0, ExitCode.PEER_LOST, 0, 1)
        await stage.pass_time(11)
        await stage.pass_time(2)  # since when a worker has no node is on record
        at = stage.api.count + place
        stage.api.kill_at = staticmethod(lambda number: when if number == at else None)
        await stage.pass_time(301)
        assert await sizes(stage) == {"job-worker-0": "2", "job-worker-1": "2", "job-spare-0-2": "2"}
        assert (await stage.job())["status"]["gangSize"] == {"data": 2, "sinceAttempt": 2}
