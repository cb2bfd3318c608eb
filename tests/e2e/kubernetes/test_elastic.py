"""A gang on two real nodes that trains on with one of them while the other is closed, and on both again afterwards."""

import json

import pytest
from cluster.jobs import SAVE_INTERVAL, E2eJob, lasting, space, volume
from cluster.runtime import Cluster

from megatronapp_common.names import CHECKPOINT_TRACKER, LABEL_JOB, LABEL_REPLICA_TYPE

pytestmark = pytest.mark.timeout(3600)
NAME = "elastic"
PATIENCE_S = 60


def apart() -> dict[str, object]:
    """Return the affinity by which no two workers share a node."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {LABEL_JOB: NAME, LABEL_REPLICA_TYPE: "worker"}},
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def test_a_gang_trains_on_without_a_node_and_grows_when_it_is_back(cluster: Cluster, release: str) -> None:
    with space(cluster, NAME) as namespace:
        folder = volume(cluster, namespace, NAME)
        try:
            manifest = lasting(NAME, NAME)
            manifest["spec"] |= {"nodes": 2, "affinity": apart()}
            elastic = {"minData": 1, "patienceSeconds": PATIENCE_S}
            manifest["spec"]["runPolicy"] |= {"restart": "InPlace", "elastic": elastic}
            job = E2eJob(cluster, namespace, manifest)
            tracker = folder / "checkpoints" / CHECKPOINT_TRACKER
            job.wait(lambda: tracker.exists() and job.iteration(0) > 0, "a checkpoint")
            closed = next(pod for pod in job.pods() if pod["metadata"]["name"] == f"{NAME}-worker-1")
            cluster.kubectl("cordon", closed["spec"]["nodeName"])
            try:
                gets_smaller(job, closed["metadata"]["name"])
            finally:
                cluster.kubectl("uncordon", closed["spec"]["nodeName"])
            gets_whole(job)
        finally:
            cluster.kubectl("delete", "persistentvolume", NAME, "--wait=false")


def gets_smaller(job: E2eJob, lost: str) -> None:
    """Delete the pod on the closed node, and check that the other worker trains on alone, from a checkpoint."""
    job.cluster.kubectl("delete", "pod", lost, "-n", job.namespace, "--wait=false")
    job.wait_for_progress(2, SAVE_INTERVAL, "as attempt 2")
    status = job.status()
    assert status["gangSize"] == {"data": 1, "sinceAttempt": 2}
    assert (status["dataParallelSize"], status["worldSize"]) == (1, 1)
    assert "continues with 1 model replica, 2 before" in job.events()["DataParallelReduced"]
    assert status["restartsTowardsMax"] == 0
    job.wait(lambda: reason(job) == "NodesMissing", "a spare has no node")


def gets_whole(job: E2eJob) -> None:
    """Check that the gang ends with a checkpoint once the node is open, and trains on both."""
    job.wait(lambda: "GrowsAtCheckpoint" in job.events(), "a spare has the node")
    job.wait_for_progress(3, SAVE_INTERVAL, "as attempt 3")
    status = job.status()
    assert status["gangSize"] == {"data": 2, "sinceAttempt": 3}, json.dumps(status["failures"])
    assert (status["dataParallelSize"], status["restartsTowardsMax"]) == (2, 0)
    assert reason(job) == "FullSize"
    assert len({pod["spec"]["nodeName"] for pod in job.pods()}) == 2
    print("time spent:", json.dumps(status["timeSpent"]))
    assert status["timeSpent"]["absentSeconds"] > 0


def reason(job: E2eJob) -> str | None:
    """Return the reason of the condition about the size of the gang."""
    conditions = job.status().get("conditions", ())
    return next((entry["reason"] for entry in conditions if entry["type"] == "DataParallelReduced"), None)
