"""Placement of the chart's own pods, as helm renders it."""

import subprocess
from typing import Any

import kube
import pytest
import yaml

CHART = kube.ROOT / "charts" / "megatronapp"
HOST = "kubernetes.io/hostname"


def pods(*settings: str) -> dict[str, dict[str, Any]]:
    """Return the specs of the pods of all deployments, with their labels, by the last part of their names."""
    flags = [flag for setting in settings for flag in ("--set", setting)]
    helm = str(kube.programs("helm") / "helm")
    command = [helm, "template", "megatronapp", str(CHART), "--kube-version", "1.35.4", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]
    deployments = {
        document["metadata"]["name"]: document["spec"]["template"]
        for document in documents
        if document["kind"] == "Deployment"
    }
    return {name.rpartition("-")[2]: template for name, template in deployments.items()}


def test_a_single_replica_has_no_affinity() -> None:
    assert all("affinity" not in pod["spec"] for pod in pods().values())


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_two_replicas_prefer_nodes_of_their_own(part: str) -> None:
    pod = pods(f"{part}.replicaCount=2")[part]
    ((kind, terms),) = pod["spec"]["affinity"]["podAntiAffinity"].items()
    assert kind.startswith("preferred"), "an update has one replica more than there may be nodes"
    term = terms[0]["podAffinityTerm"]
    assert term["topologyKey"] == HOST
    chosen = term["labelSelector"]["matchLabels"]
    assert chosen["app.kubernetes.io/component"] == part and chosen.items() <= pod["metadata"]["labels"].items()


def test_the_users_own_placement_takes_the_place_of_ours() -> None:
    spread = "operator.topologySpreadConstraints[0].topologyKey=topology.kubernetes.io/zone"
    spec = pods("operator.replicaCount=2", spread, "operator.priorityClassName=system-cluster-critical")["operator"][
        "spec"
    ]
    assert "affinity" not in spec and spec["topologySpreadConstraints"] and spec["priorityClassName"]
    given = pods("operator.replicaCount=2", "operator.affinity.nodeAffinity.mine=1")["operator"]["spec"]["affinity"]
    assert set(given) == {"nodeAffinity"}
