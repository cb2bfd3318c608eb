"""Missing image of the agent: the training does without, and users can read why the page is empty."""

import pytest
from cluster.jobs import E2eJob, example
from cluster.runtime import Cluster

NOWHERE = "registry.invalid/megatronapp-analyzer:none"


@pytest.mark.timeout(3600)
def test_agent_that_cannot_be_pulled(cluster: Cluster, release: str, namespace: str) -> None:
    manifest = example()
    del manifest["spec"]["faults"]
    manifest["spec"]["analyzer"]["image"] = NOWHERE
    manifest["spec"]["training"]["trainIters"] = 40
    job = E2eJob(cluster, namespace, manifest)
    cluster.wait(lambda: "AgentNotRunning" in job.events(), "the event AgentNotRunning")
    message = job.events()["AgentNotRunning"]
    assert NOWHERE in message and f"{job.name}-worker-" in message, message
    job.wait(lambda: job.status().get("phase") == "Succeeded", "the end of a training without agents")
    assert job.status()["progress"]["iteration"] == 40
    cluster.wait(lambda: all(item["status"]["phase"] != "Pending" for item in job.pods()), "no pod holds its node")
