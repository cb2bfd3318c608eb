"""The chart on real nodes, and the example of the README on it: trained, traced, and its slow rank named."""

import pytest
from cluster.jobs import Job, example
from cluster.runtime import Cluster

SLOW_RANK = 1


@pytest.mark.timeout(3600)
def test_example(cluster: Cluster, release: str, namespace: str) -> None:
    job = Job(cluster, namespace, example())
    cluster.wait(lambda: job.status().get("phase") == "Running", "training", 600)
    workers = job.pods()
    assert [item["metadata"]["name"] for item in workers] == [f"{job.name}-worker-0", f"{job.name}-worker-1"]
    assert {item["spec"]["nodeName"] for item in workers} == {"node-1", "node-2"}

    cluster.wait(lambda: bool(job.hub("/api/v1/summary")["slowRanks"]), "a slow rank at the hub", 600)
    verdict = job.hub("/api/v1/summary")["slowRanks"][0]
    assert (verdict["subject"]["ranks"], verdict["cause"]) == ([SLOW_RANK], "compute")
    cluster.wait(lambda: "SlowNodeDetected" in job.events(), "the event SlowNodeDetected", 60)

    cluster.wait(lambda: job.status().get("phase") == "Succeeded", "the end", 900)
    progress = job.status()["progress"]
    assert progress["iteration"] == progress["totalIterations"] == 120
