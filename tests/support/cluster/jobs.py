"""Manifests for the cluster, and what is read of jobs there."""

import contextlib
import copy
import datetime
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from cluster.images import name as name_of_image
from cluster.layout import ROOT
from cluster.runtime import Cluster

from megatronapp_common.names import LABEL_REPLICA_INDEX, LABEL_SPARE

QUERY_HUB = pathlib.Path(__file__).with_name("query_hub.py")
LONG_S = 600
"""Patience with a machine that others use, too."""
SHARED = "/shared"
"""Path at which workers mount the volume."""
SAVE_INTERVAL = 50
KILL_RANK = """
import os, pathlib, signal, time
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"megatronapp_trainer.pretrain" in path.read_bytes().split(b"\\0"):
        print(time.time(), flush=True)
        os.kill(int(path.parent.name), signal.SIGKILL)
        break
else:
    raise SystemExit("no rank runs here")
"""
"""Program for a trainer container: kills one of its ranks, and prints when."""
PREPARE = [
    *("megatronapp", "data", "prepare", "--input", "/usr/lib/python3.11/email", "--pattern", "*.py"),
    *("--output", f"{SHARED}/corpus", "--train-tokenizer", "--vocab-size", "512", "--append-eod"),
]
"""Text that the image has already: sources of Python's library."""


def volume(cluster: Cluster, namespace: str, name: str) -> pathlib.Path:
    """Make a folder of the machine that both nodes see a volume that many may write, with a claim of its name on it."""
    folder = cluster.layout.folder / "volumes" / name
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run on a standing cluster
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    shape = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    made = {**shape, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}}
    claim = {**shape, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": name}
    cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": made},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim},
        namespace=namespace,
    )
    return folder


class E2eJob:
    """A job on the cluster."""

    def __init__(self, cluster: Cluster, namespace: str, manifest: dict[str, Any]) -> None:
        self.cluster, self.namespace, self.manifest = cluster, namespace, manifest
        self.name: str = manifest["metadata"]["name"]
        cluster.apply(manifest, namespace=namespace)

    def wait(self, done: Callable[[], Any], what: str, seconds: float = LONG_S) -> None:
        """Wait until something is true; a job that fails meanwhile fails the test."""

        def reached() -> bool:
            return bool(self.status()) and bool(done())

        self.cluster.wait(reached, what, seconds)

    def status(self) -> dict[str, Any]:
        """Return its status. A failed job fails the test with all that is known."""
        found: dict[str, Any] = self.cluster.get("megatronjob", self.name, "-n", self.namespace).get("status", {})
        assert found.get("phase") != "Failed", json.dumps(found, indent=1)
        return found

    @property
    def attempt(self) -> int:
        """Life of the gang, counted from 0."""
        return int(self.status().get("attempt", 0))

    def iteration(self, attempt: int) -> int:
        """Return the number of finished steps that this attempt, or a later one, has reported; 0 before its first
        report."""
        progress = self.status().get("progress") or {}
        trains = progress.get("attempt", -1) >= attempt and progress.get("state") == "training"
        return int(progress.get("iteration") or 0) if trains else 0

    def wait_for_progress(self, attempt: int, beyond: int, what: str) -> None:
        """Wait until this attempt, or a later one, has passed a step."""
        self.wait(lambda: self.iteration(attempt) > beyond, f"training goes on {what}")

    def pods(self, kind: str = "worker") -> list[dict[str, Any]]:
        """Return its pods of a kind, by name."""
        label = f"megatronapp.io/job-name={self.name},megatronapp.io/replica-type={kind}"
        items: list[dict[str, Any]] = self.cluster.get("pods", "-n", self.namespace, "-l", label)["items"]
        return sorted(items, key=lambda item: str(item["metadata"]["name"]))

    def places(self) -> dict[str, dict[str, Any]]:
        """Return the worker pods that are not being deleted by the index of their worker; a spare under "spare"."""
        found = [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]
        return {
            "spare" if LABEL_SPARE in pod["metadata"]["labels"] else pod["metadata"]["labels"][LABEL_REPLICA_INDEX]: pod
            for pod in found
        }

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of its status; empty without one."""
        found: list[dict[str, Any]] = self.status().get("conditions", [])
        return next((entry for entry in found if entry["type"] == kind), {})

    def events(self) -> dict[str, str]:
        """Events in its namespace: reason to newest message."""
        items = self.cluster.get("events", "-n", self.namespace)["items"]
        oldest_first = sorted(
            items, key=lambda item: item.get("lastTimestamp") or item["metadata"]["creationTimestamp"]
        )
        return {str(item["reason"]): str(item["message"]) for item in oldest_first}

    def uids(self) -> set[str]:
        """Return the uids of its worker pods, which distinguish them from later ones of the same names."""
        return {str(item["metadata"]["uid"]) for item in self.pods()}

    def losses(self) -> dict[int, dict[int, float]]:
        """Return the losses that its hub has received: attempt to step to loss. Step n follows iteration n."""
        series, found = self.hub("/api/v1/metrics/series?name=loss"), dict[int, dict[int, float]]()
        for attempt, step, value in zip(series["attempts"], series["steps"], series["values"], strict=True):
            found.setdefault(attempt, {})[step] = value
        return found

    def hub(self, path: str) -> Any:
        """Query the job's hub from within the hub's pod."""
        arguments = ("--", "python", "-c", QUERY_HUB.read_text(encoding="utf-8"), path)
        return json.loads(self.cluster.kubectl("exec", f"{self.name}-hub", "-n", self.namespace, *arguments))


def seconds(text: str) -> float:
    """Return a time of RFC 3339, of up to nine digits of a second, in seconds since the epoch."""
    return datetime.datetime.fromisoformat(text).timestamp()


def example(name: str = "gpt-tiny-cpu") -> dict[str, Any]:
    """Return an example; by default that of the README."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    return document


def lasting(name: str, claim: str) -> dict[str, Any]:
    """Return a job of two ranks that runs until it is deleted, on text that it prepares on a volume first."""
    document = copy.deepcopy(example())
    document["metadata"]["name"] = name
    spec = document["spec"]
    del spec["faults"], spec["model"]["vocabSize"]
    spec["procPerNode"] = 1
    spec["parallelism"] = {"data": 2}
    spec["model"] |= {"numLayers": 2, "seqLength": 64}
    spec["training"] |= {"trainIters": 1_000_000, "globalBatchSize": 4, "lrDecayStyle": "constant", "evalIters": 0}
    volume = {"claim": claim, "mountPath": SHARED}
    spec["data"] = {
        "path": [f"{SHARED}/corpus_text_document"], "tokenizer": f"{SHARED}/tokenizer.json", "volume": volume
    }  # fmt: skip
    spec["initializers"] = [{"name": "prepare", "image": name_of_image("trainer"), "command": PREPARE}]
    # After an upgrade the next gang has another hub, which knows of earlier attempts by its volume alone.
    spec["analyzer"]["volume"] = {"claim": claim}
    spec["checkpoint"] = {"save": f"{SHARED}/checkpoints", "saveInterval": SAVE_INTERVAL, "keep": 3}
    spec["tolerations"] = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for what in ("not-ready", "unreachable")
    ]
    spec["runPolicy"] = {
        "backoff": {"initialSeconds": 1},
        "maxRestarts": 10,
        "terminationGracePeriodSeconds": 45,
        "lostNodeTimeoutSeconds": 5,
    }
    return document


@contextlib.contextmanager
def space(cluster: Cluster, name: str) -> Iterator[str]:
    """Create a namespace under the restricted standard, and delete it at the end."""
    cluster.namespace(name)
    yield name
    # Jobs first: a namespace ends its pods first of all, and looks again only after half of their grace period.
    cluster.kubectl("delete", "megatronjobs", "--all", "-n", name, "--ignore-not-found", "--timeout=120s")
    cluster.kubectl("delete", "namespace", name, "--wait=false")
