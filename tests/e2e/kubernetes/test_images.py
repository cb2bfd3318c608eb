"""A pod from each image, under the restricted standard: who it runs as, what is in it, and what is not."""

import json
import pathlib
import re
from typing import Any

import pytest
from cluster.images import name
from cluster.layout import ROOT
from cluster.runtime import Cluster

IMPORTS = {
    "operator": ["megatronapp_operator.plan", "megatronapp_operator.gateway.app", "kopf"],
    "analyzer": ["megatronapp_analyzer.agent.service", "megatronapp_analyzer.hub.http.app", "megatronapp_native"],
    "trainer": ["megatronapp_trainer.launch.main", "megatronapp_native", "megatron.core", "torch"],
}
READ_IMAGE = pathlib.Path(__file__).with_name("read_image.py")


def pod(part: str) -> dict[str, Any]:
    narrow = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    container = {
        "name": "main",
        "image": name(part),
        "command": ["python", "-c", READ_IMAGE.read_text(encoding="utf-8"), *IMPORTS[part]],
        "securityContext": narrow,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": part}, "spec": spec}


def constraints() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


@pytest.mark.timeout(3600)  # the first test brings the cluster up
@pytest.mark.parametrize("part", ["operator", "analyzer", "trainer"])
def test_image(cluster: Cluster, namespace: str, part: str) -> None:
    cluster.apply(pod(part), namespace=namespace)

    def ended() -> bool:
        return cluster.get("pod", part, "-n", namespace)["status"]["phase"] in {"Succeeded", "Failed"}

    cluster.wait(ended, f"the pod of {part}")
    log = cluster.kubectl("logs", part, "-n", namespace)
    assert "LOOK " in log, log
    seen = json.loads(log.rpartition("LOOK ")[2])
    exact = constraints()
    assert seen["uid"] == 65532
    assert seen["command"] == "/opt/megatronapp/own/bin/megatronapp"
    assert not seen["writable"] and not seen["pip"] and not seen["left"]
    others = {found: version for found, version in seen["versions"].items() if not found.startswith("megatronapp-")}
    others.pop("setuptools", None)  # `make constraints` leaves it out
    assert others == {found: exact.get(found) for found in others}
    assert ("torch" in seen["versions"]) == (part == "trainer")
    assert seen["page"] == (part != "trainer")
