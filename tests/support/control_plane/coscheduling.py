"""The scheduler of scheduler-plugins on a real API server: the coscheduling plugin places gangs whole or not.

Configured as its chart does, with this plugin alone and the default waiting time. Nodes are objects without machines.
"""

import contextlib
import dataclasses
import json
import pathlib
import secrets
import subprocess
from collections.abc import Iterator

import httpx
import kube
import yaml
from queued_nodes import QueuedNodes

from megatronapp_operator.backends.kubernetes.client.resources import COSCHEDULING_POD_GROUPS, Object
from megatronapp_operator.backends.kubernetes.render.pod.scheduling import SCHEDULERS

SERVER = "api-1.30"
"""The release of Kubernetes that this scheduler is built from."""
MERGE = {"Content-Type": "application/merge-patch+json"}


@dataclasses.dataclass(slots=True)
class ScheduledNodes(QueuedNodes):
    """Nodes that take what a scheduler has placed; `full` are workers that they do not start yet."""

    def _takes(self, name: str, pod: Object) -> bool:
        return bool(pod["spec"].get("nodeName")) and name not in self.full


@contextlib.contextmanager
def scheduler(plane: kube.ControlPlane, folder: pathlib.Path) -> Iterator[None]:
    """Install the definitions and run the scheduler until the block ends."""
    programs = kube.programs("scheduler-plugins")
    plane.define(programs / "crds")
    config = folder / "scheduler.yaml"
    config.write_text(yaml.safe_dump(_configuration(plane)), encoding="utf-8")
    command = [str(programs / "kube-scheduler"), f"--config={config}", "--secure-port=0"]
    with (folder / "scheduler.log").open("wb") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            yield
            assert process.poll() is None, (folder / "scheduler.log").read_text(encoding="utf-8")[-3000:]
        finally:
            process.kill()
            process.wait()


def _configuration(plane: kube.ControlPlane) -> Object:
    plugins = {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "PrioritySort"}]}
    waiting = {"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(plane.kubeconfig())},
        "profiles": [
            {
                "schedulerName": SCHEDULERS["Coscheduling"],
                "plugins": {"multiPoint": plugins},
                "pluginConfig": [waiting],
            }
        ],
    }


@contextlib.contextmanager
def nodes(plane: kube.ControlPlane, *names: str) -> Iterator[None]:
    """Nodes with room for one worker each, for as long as the block runs."""
    with plane.client() as client:
        for name in names:
            add(client, name)
        try:
            yield
        finally:
            for node in client.get("/api/v1/nodes").json()["items"]:
                client.delete(f"/api/v1/nodes/{node['metadata']['name']}")


def add(client: httpx.Client, name: str) -> None:
    """Add one such node."""
    capacity = {"cpu": "1", "memory": "64Gi", "pods": "110", "ephemeral-storage": "1Ti"}
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    status = {"allocatable": capacity, "capacity": capacity}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}
    answer = client.post("/api/v1/nodes", json=node)
    assert answer.is_success, answer.text
    close(client, name, closed=False)  # the API server closes new nodes; the node controller would open them


def close(client: httpx.Client, name: str, *, closed: bool) -> None:
    """Take no new pods on a node, or take them again. It keeps its room, unlike one that is cordoned."""
    taints = [{"key": "test", "value": "closed", "effect": "NoSchedule"}] if closed else None
    answer = client.patch(f"/api/v1/nodes/{name}", content=json.dumps({"spec": {"taints": taints}}), headers=MERGE)
    assert answer.is_success, answer.text


def touch(client: httpx.Client, namespace: str, group: str) -> None:
    """Change a pod group, so that its gang is tried again at once.

    The plugin is called again when a group changes or a pod is placed; when a node is added or other pods end, its
    gangs are tried only after the five minutes that Kubernetes leaves a pod alone.
    """
    path = COSCHEDULING_POD_GROUPS.path(namespace, group)
    change = {"metadata": {"annotations": {"test": secrets.token_hex(4)}}}
    answer = client.patch(path, content=json.dumps(change), headers=MERGE)
    assert answer.is_success, answer.text
