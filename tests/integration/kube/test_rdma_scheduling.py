"""Workers that ask for RDMA devices, on nodes of kwok that advertise them, placed by Kubernetes' own scheduler."""

import contextlib
import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import gateway
import httpx
import kube
import pytest
import rendered
from ports import reserved_ports

pytestmark = pytest.mark.full("builds kube-scheduler and kwok")
RESOURCE = "rdma/hca_shared_devices_a"
GPU_CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "8"}
NODES = {
    "ib-0": GPU_CAPACITY | {RESOURCE: "2"},
    "ib-1": GPU_CAPACITY | {RESOURCE: "2"},
    "ethernet": GPU_CAPACITY,
    "one-left": GPU_CAPACITY | {RESOURCE: "1"},
}
STAGES = kube.ROOT / "bench" / "kwok"
NAMESPACE = "team"


@contextlib.contextmanager
def running(command: list[str], log: pathlib.Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def client(tmp_path: pathlib.Path) -> Iterator[httpx.Client]:
    """Start a cluster with these nodes, simulated by kwok, and a scheduler."""
    with kube.control_plane(tmp_path) as plane, plane.client() as client, reserved_ports(1) as (port,):
        assert plane.kubectl("create", "namespace", NAMESPACE).returncode == 0
        for name, capacity in NODES.items():
            metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}}
            status = {"allocatable": capacity, "capacity": capacity}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
            assert client.post("/api/v1/nodes", json=node).is_success
            merge = {"Content-Type": "application/merge-patch+json"}
            untainted = json.dumps({"spec": {"taints": None}})
            assert client.patch(f"/api/v1/nodes/{name}", content=untainted, headers=merge).is_success
        config = f"--kubeconfig={plane.kubeconfig()}"
        kwok = [
            *(
                str(kube.programs("kwok") / "kwok"),
                config,
                "--manage-all-nodes=true",
                "--node-lease-duration-seconds=0",
            ),
            *(f"--config={STAGES / 'nodes.yaml'},{STAGES / 'pods.yaml'}", "--cidr=127.64.0.1/12"),
            f"--server-address=127.0.0.1:{port}",
        ]
        scheduler = [
            str(kube.programs("cluster") / "kube-scheduler"),
            config,
            "--leader-elect=false",
            "--secure-port=0",
        ]
        with running(kwok, tmp_path / "kwok.log"), running(scheduler, tmp_path / "scheduler.log"):
            # A pod that is bound while kwok is finding the nodes may be missed by it, and never run.
            gateway.wait_for(lambda: ready_nodes(client) == set(NODES), tmp_path / "kwok.log")
            yield client


def ready_nodes(client: httpx.Client) -> set[str]:
    """Return the nodes that kwok has made ready, whose pods it lets run."""
    answer = client.get("/api/v1/nodes")
    return {
        node["metadata"]["name"]
        for node in answer.json()["items"]
        if any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"].get("conditions", ()))
    }


def pods(client: httpx.Client) -> dict[str, dict[str, Any]]:
    answer = client.get(f"/api/v1/namespaces/{NAMESPACE}/pods")
    return {item["metadata"]["name"]: item for item in answer.json()["items"]}


def unscheduled(pod: dict[str, Any]) -> str:
    """Return why the scheduler finds no node; empty: it has not reported."""
    conditions = pod["status"].get("conditions", ())
    return next(
        (
            condition["message"]
            for condition in conditions
            if condition["type"] == "PodScheduled" and condition["status"] == "False"
        ),
        "",
    )


def test_workers_are_placed_on_nodes_with_the_requested_devices(client: httpx.Client) -> None:
    rdma = {"enabled": True, "resourceName": RESOURCE, "count": 2}
    patch = {**rendered.GPUS, "nodes": 3, "network": {"mode": "SharedDevice", "rdma": rdma}}
    job = rendered.make_job(patch, namespace=NAMESPACE)
    for index in range(3):
        answer = client.post(f"/api/v1/namespaces/{NAMESPACE}/pods", json=rendered.make_worker(job, index))
        assert answer.is_success, answer.text

    def settled() -> bool:
        """Each of two pods takes both devices of a node, of which the scheduler finds none for the third."""
        found = pods(client).values()
        placed = sorted(pod["spec"]["nodeName"] for pod in found if pod["spec"].get("nodeName"))
        left = [unscheduled(pod) for pod in found if not pod["spec"].get("nodeName")]
        return placed == ["ib-0", "ib-1"] and [f"4 Insufficient {RESOURCE}" in why for why in left] == [True]

    gateway.wait_for(settled)
    gateway.wait_for(lambda: sum(pod["status"]["phase"] == "Running" for pod in pods(client).values()) == 2)
