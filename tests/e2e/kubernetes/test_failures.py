"""What happens to a running gang on real nodes: a killed rank, an evicted pod, a deleted pod. It goes on each time."""

import json
import pathlib

import pytest
from cluster.jobs import Job, lasting
from cluster.runtime import Cluster

NAME = "kept"
KILL = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"megatronapp_trainer.pretrain" in path.read_bytes().split(b"\\0"):
        os.kill(int(path.parent.name), signal.SIGKILL)
        break
else:
    raise SystemExit("no rank runs here")
"""


def make_volume(cluster: Cluster, namespace: str) -> None:
    """A folder of the machine that both nodes see, as a volume that many may write."""
    folder = cluster.layout.folder / "volumes" / namespace
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    shape = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {**shape, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}}
    claim = {**shape, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": namespace}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": NAME}, "spec": claim},
        namespace=namespace,
    )


def saved(cluster: Cluster, namespace: str) -> int:
    """The newest step of which a checkpoint lies on the volume."""
    path: pathlib.Path = cluster.layout.folder / "volumes" / namespace / "latest_checkpointed_iteration.txt"
    return int(path.read_text(encoding="utf-8")) if path.exists() else 0


def evict(cluster: Cluster, namespace: str, pod: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


@pytest.mark.timeout(3600)
def test_a_gang_goes_on(cluster: Cluster, release: str, namespace: str) -> None:
    make_volume(cluster, namespace)
    job = Job(cluster, namespace, lasting(NAME, NAME))
    cluster.wait(lambda: saved(cluster, namespace) >= 20 and job.iteration(0) > 20, "training", 600)

    cluster.kubectl("exec", f"{NAME}-worker-1", "-c", "trainer", "-n", namespace, "--", "python", "-c", KILL)
    cluster.wait(lambda: job.iteration(1) > 20, "training goes on after a killed rank", 600)
    status = job.status()
    assert [(each["worker"], each["reason"]) for each in status["failures"]] == [(1, "RankKilled")]
    assert status["restartsTowardsMax"] == 1

    reached = job.iteration(1)
    evict(cluster, namespace, f"{NAME}-worker-0")
    cluster.wait(lambda: job.iteration(2) > reached, "training goes on after an eviction", 600)
    assert job.status()["restartsTowardsMax"] == 1
    log = cluster.kubectl("logs", f"{NAME}-worker-0", "-c", "trainer", "-n", namespace)
    assert saved(cluster, namespace) >= reached, log

    cluster.kubectl("delete", "pod", f"{NAME}-worker-1", "-n", namespace, "--wait=false")
    cluster.wait(lambda: job.iteration(3) > reached, "training goes on after a deleted pod", 600)
    assert len(job.pods()) == 2
