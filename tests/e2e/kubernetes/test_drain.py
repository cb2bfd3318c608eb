"""Drain of a real node under a gang with `disruption: CheckpointFirst`: evictions wait until the ranks have saved.

The job saves at no step by itself, so its first checkpoint is that which the operator requests for the drain.
"""

import contextlib
import json
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest
from cluster import chart
from cluster.jobs import LONG_S, E2eJob, lasting, space, volume
from cluster.layout import ClusterError
from cluster.runtime import Cluster

from megatronapp_common.names import CHECKPOINT_TRACKER

pytestmark = pytest.mark.timeout(3600)
NAME = "drained"
AGE_S = 120
"""Age up to which a checkpoint is young: `kubectl drain` tries again many times meanwhile, also where all is slow."""
BUDGET = {f"{NAME}-workers": 2}
"""Number of workers that the budget of the job keeps."""


@pytest.fixture
def operator_that_reads_nodes(cluster: Cluster, release: str) -> Iterator[None]:
    """Install the chart with the right to read nodes, and without it afterwards."""
    chart.install(cluster, "--set", "rbac.nodeAccess=true")
    yield
    chart.install(cluster)


@pytest.mark.usefixtures("operator_that_reads_nodes")
def test_drain_waits_for_a_checkpoint(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    with space(cluster, NAME) as namespace:
        folder = volume(cluster, namespace, NAME)
        try:
            manifest = lasting(NAME, NAME)
            manifest["spec"]["runPolicy"] |= {"disruption": "CheckpointFirst", "checkpointAgeSeconds": AGE_S}
            manifest["spec"]["checkpoint"]["saveInterval"] = manifest["spec"]["training"]["trainIters"]
            job = E2eJob(cluster, namespace, manifest)
            refuses_evictions(job)
            assert not (folder / "checkpoints" / CHECKPOINT_TRACKER).exists()
            drained = job.pods()[1]["spec"]["nodeName"]
            with cordoned_by_drain(cluster, drained, tmp_path / "drain.log"):
                step = saved_for_drain(job, drained)
                assert (folder / "checkpoints" / f"iter_{step:07d}").is_dir()
                continues_elsewhere(job, drained, step)
            job.wait(lambda: reason(job) == "CheckpointOld" and budgets(job) == BUDGET, "the next gang is protected")
            suspends(job)
        finally:
            cluster.kubectl("delete", "persistentvolume", NAME, "--wait=false")


def refuses_evictions(job: E2eJob) -> None:
    """Wait until the gang has trained for too long without a checkpoint, and check that no worker can be evicted."""
    job.wait(lambda: job.iteration(0) > 0, "the gang trains")
    job.wait(lambda: reason(job) == "CheckpointOld" and budgets(job) == BUDGET, "the gang is protected")
    before = job.uids()
    for index in range(2):
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": f"{NAME}-worker-{index}"}}
        path = f"/api/v1/namespaces/{job.namespace}/pods/{NAME}-worker-{index}/eviction"
        with pytest.raises(ClusterError, match="disruption budget"):
            job.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    assert (job.attempt, job.uids()) == (0, before)


@contextlib.contextmanager
def cordoned_by_drain(cluster: Cluster, node: str, log: pathlib.Path) -> Iterator[None]:
    """Drain a node of the job's pods while the block runs, check that the drain has ended well, and uncordon it.

    The operator stays where it is: all its Events are recorded.
    """
    selector = f"--pod-selector=megatronapp.io/job-name={NAME}"
    options = ("--ignore-daemonsets", "--delete-emptydir-data", selector, f"--timeout={2 * LONG_S}s")
    command = cluster.layout.first.inside(*cluster.command(), "drain", node, *options)
    try:
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as drain:
            try:
                yield
                cluster.wait(lambda: drain.poll() is not None, "the drain ends", LONG_S)
            finally:
                drain.kill()
                print(f"\n{log.read_text(encoding='utf-8')}")
        assert drain.returncode == 0, log.read_text(encoding="utf-8")
    finally:
        cluster.kubectl("uncordon", node)


def saved_for_drain(job: E2eJob, node: str) -> int:
    """Check that an eviction waits until a checkpoint is saved on request, and return its step."""
    job.wait(lambda: "EvictionWaits" in job.events(), "the operator sees that the node is drained")
    waits = f"node {node} is cordoned: an eviction waits for a checkpoint; this attempt has no checkpoint yet"
    assert job.events()["EvictionWaits"] == waits
    job.wait(lambda: "CheckpointYoung" in job.events(), "a checkpoint is saved on request")
    message = job.events()["CheckpointYoung"]
    match = re.search(r"the newest is of step (\d+), taken at ", message)
    assert match is not None, message
    return int(match[1])


def continues_elsewhere(job: E2eJob, node: str, step: int) -> None:
    """Check that the gang trains on another node from that checkpoint, or from one that it saved at its eviction."""
    job.wait_for_progress(1, step, "as attempt 1")
    assert node not in {pod["spec"]["nodeName"] for pod in job.pods()}
    logs = [
        job.cluster.kubectl("logs", pod["metadata"]["name"], "-c", "trainer", "-n", job.namespace) for pod in job.pods()
    ]
    resumed = re.findall(r"resumes after step (\d+) of", "\n".join(logs))
    assert resumed, [text[-4000:] for text in logs]
    assert int(resumed[-1]) >= step > 0
    assert job.status()["restartsTowardsMax"] == 0, "an eviction is nobody's fault"


def suspends(job: E2eJob) -> None:
    """Check that nothing protects a job that has no gang."""
    patch = json.dumps({"spec": {"suspend": True}})
    job.cluster.kubectl("patch", "megatronjob", NAME, "-n", job.namespace, "--type=merge", "-p", patch)
    job.wait(lambda: job.status().get("phase") == "Suspended" and budgets(job) == {}, "no gang, and no budget")
    assert reason(job) == "EvictionsAllowed"


def budgets(job: E2eJob) -> dict[str, int]:
    """Return the disruption budgets of the job's namespace: name to number of pods."""
    items = job.cluster.get("poddisruptionbudgets", "-n", job.namespace)["items"]
    return {item["metadata"]["name"]: item["spec"]["minAvailable"] for item in items}


def reason(job: E2eJob) -> str | None:
    """Return why evictions are refused, or allowed, now."""
    found: str | None = job.condition("EvictionsRefused").get("reason")
    return found
