"""One real cluster for all tests of this folder; they run where MEGATRONAPP_E2E is set, as `make e2e` does.

MEGATRONAPP_E2E=standing takes the cluster that `python -m cluster up` brought up, and leaves it standing.
"""

import os
from collections.abc import Iterator

import pytest
from cluster import machine
from cluster.runtime import Cluster, running, standing

WANTED = os.environ.get("MEGATRONAPP_E2E", "")
collect_ignore_glob = [] if WANTED else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if WANTED == "standing":
        yield standing()
        return
    if reason := machine.missing():
        pytest.skip(f"{reason} (the cluster takes {machine.DISK_GB} GB and {machine.MINUTES} minutes)")
    with running() as cluster:
        yield cluster


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace under the restricted standard, gone after the test."""
    name = request.node.name.removeprefix("test_").replace("_", "-").replace("[", "-").replace("]", "")[:40]
    cluster.namespace(name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
