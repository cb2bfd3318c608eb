"""Placement of the chart's own pods, as helm renders it."""

import subprocess
from typing import Any

import kube
import pytest
import yaml

CHART = kube.ROOT / "charts" / "megatronapp"
HOST = "kubernetes.io/hostname"


def pods(*settings: str) -> dict[str, dict[str, Any]]:
    """Return the pods of all deployments by the last part of their names."""
    return {name: deployment["template"] for name, deployment in deployments(*settings).items()}


def deployments(*settings: str) -> dict[str, dict[str, Any]]:
    """Return the specs of all deployments by the last part of their names."""
    flags = [flag for setting in settings for flag in ("--set", setting)]
    helm = str(kube.programs("helm") / "helm")
    command = [helm, "template", "megatronapp", str(CHART), "--kube-version", "1.35.4", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]
    found = [document for document in documents if document["kind"] == "Deployment"]
    return {document["metadata"]["name"].rpartition("-")[2]: document["spec"] for document in found}


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


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_replicas_that_demand_separate_nodes_are_removed_before_others_are_added(part: str) -> None:
    """An update that adds a replica first would never end on a cluster with a node for each."""
    deployment = deployments(f"{part}.antiAffinity=required", f"{part}.replicaCount=2")[part]
    (term,) = deployment["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == HOST
    assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == part
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    other = deployments(f"{part}.antiAffinity=none", f"{part}.replicaCount=2")[part]
    assert "affinity" not in other["template"]["spec"] and "strategy" not in other
    single = deployments(f"{part}.antiAffinity=required")[part]
    assert "affinity" not in single["template"]["spec"] and "strategy" not in single, "an update needs no interruption"
