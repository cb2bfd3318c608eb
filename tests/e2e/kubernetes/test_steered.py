"""The example of a steered training on a real node: it makes the steps that are ordered, and its captures arrive."""

from typing import Any

import pytest
from cluster import gateways
from cluster.jobs import E2eJob, example
from cluster.runtime import Cluster

CAPTURES = "/api/v1/training/captures?site=residual&quantity=rms"


@pytest.mark.timeout(3600)
def test_the_hub_has_captures_of_the_ordered_steps(cluster: Cluster, release: str, namespace: str) -> None:
    job = E2eJob(cluster, namespace, example("steered-cpu"))
    job.wait(lambda: job.condition("Paused").get("status") == "True", "the pause before the first step")
    gateways.run_cli(cluster, "training", job.name, "-n", namespace, "step", "12")
    job.wait(lambda: captured(job.hub(CAPTURES)) == [(5, []), (10, [])], "captures of two steps by all ranks")
    found = job.hub(CAPTURES)
    assert len(found["layers"]) == job.manifest["spec"]["model"]["numLayers"]
    assert all(value > 0 for layer in found["values"] for value in layer)


def captured(answer: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """Return the captured steps, and the ranks that each lacks."""
    return [(step["step"], step["missing"]) for step in answer["steps"]]
