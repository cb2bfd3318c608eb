"""InfiniBand, attached networks, the node's own network, and the order of ranks."""

import base64
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import rendered

from megatronapp_common.job import load_stored_job
from megatronapp_common.names import Env
from megatronapp_operator.backends.kubernetes.render import gang
from megatronapp_operator.backends.kubernetes.render.pod import annotations
from megatronapp_operator.backends.kubernetes.render.pod.network import LABEL_HOST_NETWORK, ucx_devices
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner


def network(patch: rendered.Object, **spec: object) -> rendered.Object:
    """The first worker of a job with GPUs and this network."""
    return rendered.make_worker(rendered.make_job({**rendered.GPUS, **spec, "network": patch}))


IB = {"enabled": True, "resourceName": "rdma/ib", "hca": "mlx5_0,mlx5_1:2", "gidIndex": 3}


def test_rdma_requests_its_devices_and_configures_the_libraries() -> None:
    pod = network({"mode": "SharedDevice", "rdma": IB | {"count": 2}})
    resources = rendered.container(pod)["resources"]
    assert resources["limits"] == resources["requests"] == {"nvidia.com/gpu": "8", "rdma/ib": "2"}
    environment = rendered.environment(pod)
    assert {name: value for name, value in environment.items() if name.startswith(("NCCL_", "UCX_", "GLOO_"))} == {
        "NCCL_NET": "IB",
        "NCCL_IB_HCA": "mlx5_0,mlx5_1:2",
        "NCCL_IB_GID_INDEX": "3",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:2",
        "UCX_IB_GID_INDEX": "3",
    }


def test_nccl_must_use_the_plugin_that_reaches_elastic_fabric_adapters() -> None:
    """NCCL fails without aws-ofi-nccl, whose network is AWS Libfabric, and does not fall back to TCP."""
    pod = network({"mode": "SharedDevice", "rdma": {"enabled": True, "resourceName": "vpc.amazonaws.com/efa"}})
    assert rendered.container(pod)["resources"]["limits"]["vpc.amazonaws.com/efa"] == "1"
    assert rendered.environment(pod)["NCCL_NET"] == "AWS Libfabric"


def test_a_job_may_leave_the_network_of_nccl_to_another_plugin() -> None:
    rdma = {"enabled": True, "resourceName": "vpc.amazonaws.com/efa"}
    pod = network({"mode": "SharedDevice", "rdma": rdma, "nccl": {"NCCL_NET": "OFI"}})
    assert rendered.environment(pod)["NCCL_NET"] == "OFI"


def test_nccl_is_not_bound_to_adapters_for_jobs_of_earlier_releases() -> None:
    """Such jobs had TCP on the host network; what is stored now is refused without a device."""
    document = rendered.make_job(rendered.GPUS).to_dict()
    document["spec"]["network"] = {"mode": "HostNetwork", "policy": "None", "rdma": {"enabled": True}}
    pod = rendered.make_worker(load_stored_job(document)[0])
    assert "NCCL_NET" not in rendered.environment(pod)


@pytest.mark.parametrize(
    ("hca", "devices"),
    [
        ("mlx5_0", "mlx5_0:1"),
        ("=mlx5_0:2, mlx5_1", "mlx5_0:2,mlx5_1:1"),
        ("^mlx5_3", None),
        ("", None),
        ("=", None),
    ],
)
def test_adapters_in_the_spelling_of_ucx(hca: str, devices: str | None) -> None:
    assert ucx_devices(hca) == devices


def test_variables_of_the_user_are_never_overridden() -> None:
    env = [{"name": "NCCL_IB_HCA", "value": "mine"}, {"name": "UCX_NET_DEVICES", "value": "mine:1"}]
    env.append({"name": "NCCL_NET", "value": "Socket"})
    pod = network({"mode": "SharedDevice", "rdma": IB, "nccl": {"NCCL_IB_GID_INDEX": "0"}}, env=env)
    environment = rendered.environment(pod)
    assert [environment[name] for name in ("NCCL_IB_HCA", "UCX_NET_DEVICES", "NCCL_IB_GID_INDEX")] == [
        "mine",
        "mine:1",
        "0",
    ]
    assert environment["NCCL_NET"] == "Socket"


def test_without_rdma_the_libraries_are_not_configured() -> None:
    environment = rendered.environment(network({"mode": "Default"}))
    assert not [name for name in environment if name.startswith(("NCCL_", "UCX_", "GLOO_"))]


def test_pinning_needs_root_and_a_single_capability() -> None:
    pinned = rendered.container(network({"mode": "SharedDevice", "rdma": IB}))["securityContext"]
    assert (pinned["runAsUser"], pinned["runAsNonRoot"]) == (0, False)
    assert pinned["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    plain = network({"mode": "SharedDevice", "rdma": IB | {"ipcLock": False}})
    assert rendered.container(plain)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_nodes_own_devices_are_named_and_privileged() -> None:
    """A host network gives no device, and an unprivileged container may not open one that a host path shows."""
    pod = network({"mode": "HostNetwork", "policy": "None", "rdma": {"enabled": True, "devices": "HostPath"}})
    trainer = rendered.container(pod)
    assert trainer["securityContext"] == {"privileged": True, "runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    assert {"name": "infiniband", "mountPath": "/dev/infiniband"} in trainer["volumeMounts"]
    path = {"path": "/dev/infiniband", "type": "Directory"}
    assert {"name": "infiniband", "hostPath": path} in pod["spec"]["volumes"]
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    plugin = network({"mode": "HostNetwork", "policy": "None", "rdma": IB})
    assert "privileged" not in rendered.container(plugin)["securityContext"]
    assert not [volume for volume in plugin["spec"]["volumes"] if "hostPath" in volume]


def test_root_keeps_its_own_home() -> None:
    environments = [
        rendered.environment(network({"mode": "SharedDevice", "rdma": IB | {"ipcLock": pin}})) for pin in (True, False)
    ]
    assert ["HOME" in names for names in environments] == [False, True]


def test_the_interface_is_found_by_the_launcher() -> None:
    environment = rendered.environment(network({"mode": "SharedDevice", "rdma": IB | {"interface": "net[0-9]+"}}))
    assert environment[Env.INTERFACE] == "net[0-9]+"
    assert environment[Env.ADDRESS] == "status.podIP"
    assert Env.NETWORK_STATUS not in environment


ATTACHED = {"mode": "Sriov", "attachments": ["fabric/a", "b@net2"], "rdma": IB | {"ipcLock": False}}


def test_attached_networks_are_requested_and_awaited() -> None:
    pod = network(ATTACHED)
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "fabric/a,b@net2"
    path = "metadata.annotations['k8s.v1.cni.cncf.io/network-status']"
    assert rendered.environment(pod)[Env.NETWORK_STATUS] == path
    waiting = pod["spec"]["initContainers"][0]
    volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "annotations")
    assert volume["downwardAPI"]["items"] == [{"path": "network-status", "fieldRef": {"fieldPath": path}}]
    assert waiting["command"][-2:] == ["/run/megatronapp/annotations/network-status", "--"]
    assert waiting["image"] == rendered.container(pod)["image"]


def test_a_named_interface_needs_no_waiting() -> None:
    pod = network(ATTACHED | {"rdma": IB | {"interface": "net1"}})
    assert "initContainers" not in pod["spec"]
    assert Env.NETWORK_STATUS not in rendered.environment(pod)


def test_topology_is_passed_on_where_the_operator_may_read_nodes() -> None:
    job = rendered.make_job({"network": {"rankOrder": "Topology", "topologyKey": "rack"}})
    pod, blind = rendered.make_worker(job), rendered.make_worker(job, node_access=False)
    assert rendered.environment(pod)[Env.RANK_ORDER] == "topology"
    assert rendered.environment(pod)[Env.TOPOLOGY] == "metadata.annotations['megatronapp.io/topology']"
    assert pod["spec"]["initContainers"][0]["command"][-2:] == ["--", "/run/megatronapp/annotations/topology"]
    assert rendered.environment(blind)[Env.RANK_ORDER] == "index"
    assert "initContainers" not in blind["spec"]


def run_wait(seconds: str, *paths: pathlib.Path | str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", annotations.PROGRAM, seconds, *map(str, paths)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_waiting_ends_when_the_annotation_is_there(tmp_path: pathlib.Path) -> None:
    """Replace the file as the kubelet does: it exists, empty, and is replaced."""
    status, draft = tmp_path / "network-status", tmp_path / "draft"
    status.touch()
    with run_wait("60", status, "--") as waiting:
        draft.write_text("[]", encoding="utf-8")
        os.replace(draft, status)
        assert waiting.wait() == 0


def caught_signals(pid: int) -> int:
    """Return the signals for which a process has handlers, as a mask."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))


def test_a_wait_ends_by_a_signal_for_which_it_has_a_handler(tmp_path: pathlib.Path) -> None:
    """As process 1 of a container it would not get any other, and a deleted pod would wait with it."""
    status = tmp_path / "network-status"
    status.touch()
    with run_wait("240", status, "--") as waiting:
        while not caught_signals(waiting.pid) >> (signal.SIGTERM - 1) & 1:
            assert waiting.poll() is None
            time.sleep(0.01)
        waiting.terminate()
        assert waiting.wait(120) == 128 + signal.SIGTERM


def test_a_wait_that_times_out_names_the_missing_file(tmp_path: pathlib.Path) -> None:
    """A missing network fails the worker, a missing place in the topology does not."""
    status, topology = tmp_path / "network-status", tmp_path / "topology"
    status.touch()
    topology.touch()
    ends = []
    for paths in ((status, "--", topology), ("--", topology)):
        with run_wait("0", *paths) as waiting:
            errors = waiting.communicate()[1]
            ends.append((waiting.returncode, errors.splitlines()[0].rpartition(": ")[2]))
    assert ends == [(1, "network-status, topology"), (0, "topology")]


def test_the_network_of_the_node() -> None:
    spec = network({"mode": "HostNetwork", "policy": "None"})["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert [(port["containerPort"], port["hostPort"]) for port in spec["containers"][0]["ports"]] == [
        (19400, 19400),
        (19401, 19401),
    ]
    (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["namespaceSelector"] == {}
    labels = network({"mode": "HostNetwork", "policy": "None"})["metadata"]["labels"]
    assert term["labelSelector"] == {"matchLabels": {LABEL_HOST_NETWORK: labels[LABEL_HOST_NETWORK]}}


def test_workers_in_the_host_network_are_placed_on_separate_nodes() -> None:
    """Check that each refuses a node with the other one, whose labels it matches, as both take the same ports."""
    job = rendered.make_job({**rendered.GPUS, "nodes": 2, "network": {"mode": "HostNetwork", "policy": "None"}})
    pods = [rendered.make_worker(job, index) for index in (0, 1)]
    taken = [{port["hostPort"] for port in pod["spec"]["containers"][0]["ports"]} for pod in pods]
    assert taken[0] & taken[1], "the reason to keep them apart"
    for candidate, other in (pods, pods[::-1]):
        (term,) = candidate["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert (term["topologyKey"], term["namespaceSelector"]) == ("kubernetes.io/hostname", {})
        assert set(term["labelSelector"]) == {"matchLabels"}
        assert term["labelSelector"]["matchLabels"].items() <= other["metadata"]["labels"].items()


def test_ports_of_a_pods_own_network_are_not_the_nodes() -> None:
    spec = network({"mode": "Default"})["spec"]
    assert not any("hostPort" in port for port in spec["containers"][0]["ports"])
    assert "hostNetwork" not in spec
    assert "affinity" not in spec


def test_a_rank_table_of_any_gang_fits_into_a_config_map() -> None:
    """The largest gang that the CRD allows, with the longest names of nodes, would have more than its 1 MiB."""
    owner = JobOwner(namespace="team", name="gpt", uid="u")
    for workers, key in ((64, "rank-table.json"), (4096, "rank-table.json.gz")):
        entries = [
            {
                "index": index,
                "address": "10.128.200.200",
                "node": f"{index:063}",
                "ranks": [64 * index + k for k in range(64)],
            }
            for index in range(workers)
        ]
        table = {"attempt": 0, "digest": "d", "workers": entries}
        _, made = gang.ranks(owner, table)
        assert len(json.dumps(made)) < 1 << 20
        stored = made.get("data") or {name: unpacked(text) for name, text in made["binaryData"].items()}
        assert {name: json.loads(text) for name, text in stored.items()} == {key: table}


def unpacked(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))
