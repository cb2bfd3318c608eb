"""One real cluster for all tests of this folder; they run where MEGATRONAPP_E2E is set, as `make e2e` does.

MEGATRONAPP_E2E=standing takes the cluster that `python -m cluster up` brought up, and leaves it standing.
"""

import os
from collections.abc import Iterator

import kube
import pytest
from cluster import machine
from cluster.layout import ROOT
from cluster.runtime import Cluster, running, standing

HOME = "megatronapp-system"
CHART = ROOT / "charts" / "megatronapp"
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
    # Jobs first: a namespace ends its pods first of all, and looks again only after half of their grace period.
    cluster.kubectl("delete", "megatronjobs", "--all", "-n", name, "--ignore-not-found", "--timeout=120s")
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> str:
    """The chart, installed as its README says, in a namespace under the restricted standard."""
    cluster.namespace(HOME)
    helm = kube.programs("helm") / "helm"
    config = ("--kubeconfig", cluster.layout.kubeconfig("admin"), "--namespace", HOME)
    done = cluster.inside(helm, "upgrade", "--install", "megatronapp", CHART, *config, "--wait", seconds=400)
    assert done.returncode == 0, f"{done.stderr}\n{cluster.problems()}"
    return "megatronapp"
