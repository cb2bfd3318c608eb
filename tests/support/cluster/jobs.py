"""Manifests for the cluster, and what is read of jobs there."""

import copy
import json
import pathlib
from typing import Any

import yaml
from cluster.layout import ROOT
from cluster.runtime import Cluster

EXAMPLE = ROOT / "examples" / "gpt-tiny-cpu.yaml"
ASK = pathlib.Path(__file__).with_name("ask.py")


class Job:
    """A job on the cluster."""

    def __init__(self, cluster: Cluster, namespace: str, manifest: dict[str, Any]) -> None:
        self.cluster, self.namespace, self.manifest = cluster, namespace, manifest
        self.name: str = manifest["metadata"]["name"]
        cluster.apply(manifest, namespace=namespace)

    def status(self) -> dict[str, Any]:
        """Its status. A failed job fails the test with all that is known."""
        found: dict[str, Any] = self.cluster.get("megatronjob", self.name, "-n", self.namespace).get("status", {})
        assert found.get("phase") != "Failed", json.dumps(found, indent=1)
        return found

    def iteration(self, attempt: int) -> int:
        """Finished steps that this attempt has told of; 0 before it has."""
        progress = self.status().get("progress") or {}
        return progress.get("iteration") or 0 if progress.get("attempt") == attempt else 0

    def pods(self, kind: str = "worker") -> list[dict[str, Any]]:
        """Its pods of a kind, by name."""
        label = f"megatronapp.io/job-name={self.name},megatronapp.io/replica-type={kind}"
        items: list[dict[str, Any]] = self.cluster.get("pods", "-n", self.namespace, "-l", label)["items"]
        return sorted(items, key=lambda item: str(item["metadata"]["name"]))

    def events(self) -> list[str]:
        """Reasons of the events in its namespace."""
        return [str(item["reason"]) for item in self.cluster.get("events", "-n", self.namespace)["items"]]

    def hub(self, path: str) -> Any:
        """What its hub answers, asked from within the hub's pod."""
        words = ("--", "python", "-c", ASK.read_text(encoding="utf-8"), path)
        return json.loads(self.cluster.kubectl("exec", f"{self.name}-hub", "-n", self.namespace, *words))


def example() -> dict[str, Any]:
    """The example of the README."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return document


def lasting(name: str, claim: str) -> dict[str, Any]:
    """A job of two ranks that goes on until it is deleted, with checkpoints on a volume."""
    document = copy.deepcopy(example())
    document["metadata"]["name"] = name
    spec = document["spec"]
    del spec["faults"]
    spec["procPerNode"] = 1
    spec["parallelism"] = {"data": 2}
    spec["model"] |= {"numLayers": 2, "seqLength": 64}
    spec["training"] |= {"trainIters": 100_000, "globalBatchSize": 4}
    volume = {"claim": claim, "mountPath": "/checkpoints"}
    spec["checkpoint"] = {"save": "/checkpoints", "saveInterval": 20, "keep": 2, "volume": volume}
    spec["runPolicy"] = {"backoff": {"initialSeconds": 1}}
    return document
