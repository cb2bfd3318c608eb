"""One node: containerd, the kubelet and kube-proxy, with separate control groups and folders."""

import pathlib
import re
import subprocess
import time

from cluster import daemons, settings
from cluster.layout import ClusterError, ClusterNode, Layout

READY_S = 60
POLL_S = 0.1
HIERARCHIES = pathlib.Path("/sys/fs/cgroup")
ORDER = ("kubelet", "proxy", "containerd")
"""In which its programs end."""


def start_runtime(node: ClusterNode) -> None:
    """Start containerd and wait until it answers."""
    (node.folder / "cni").mkdir(parents=True, exist_ok=True)
    (node.folder / "cni" / "10-pods.conflist").write_text(settings.pod_network(node), encoding="utf-8")
    path = node.folder / "containerd.toml"
    path.write_text(settings.runtime(node), encoding="utf-8")
    daemons.start(node.folder, "containerd", node.inside("containerd", "--config", path))
    deadline = time.monotonic() + READY_S
    while subprocess.run(node.runtime("version"), capture_output=True, check=False).returncode != 0:
        if time.monotonic() > deadline or not daemons.alive(node.folder, "containerd"):
            raise ClusterError(f"containerd of {node.name} does not answer:\n{daemons.tail(node.folder, 'containerd')}")
        time.sleep(POLL_S)


def start_proxy(cluster: Layout, node: ClusterNode, programs: pathlib.Path) -> None:
    """Start the node's kube-proxy."""
    path = node.folder / "proxy.yaml"
    path.write_text(settings.proxy(cluster, node), encoding="utf-8")
    daemons.start(node.folder, "proxy", node.inside(programs / "kube-proxy", f"--config={path}"))


def start_kubelet(cluster: Layout, node: ClusterNode, programs: pathlib.Path) -> None:
    """Start the kubelet, which makes the node known; also after stop_kubelet."""
    _make_cgroups(node)
    (node.folder / "kubelet.yaml").write_text(settings.kubelet(cluster, node), encoding="utf-8")
    state = node.folder / "kubelet"
    kubelet = [
        programs / "kubelet",
        f"--config={node.folder / 'kubelet.yaml'}",
        f"--kubeconfig={cluster.kubeconfig(node.name)}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--root-dir={state}",
        f"--cert-dir={state / 'pki'}",
    ]
    daemons.start(node.folder, "kubelet", node.inside(*kubelet))


def stop_kubelet(node: ClusterNode) -> None:
    """End the kubelet alone: the node falls silent, and its pods run on."""
    daemons.stop(node.folder, "kubelet")


def running_pods(node: ClusterNode) -> set[str]:
    """Return the uids of the pods of which a process runs, known to the API server or not."""
    groups = HIERARCHIES.glob(f"pids/{node.cgroup}/**/cgroup.procs")
    busy = (group.parent for group in groups if group.read_text(encoding="utf-8").strip())
    found = (re.search(r"/pod([0-9a-f-]{36})/", f"{group}/") for group in busy)
    return {match[1] for match in found if match}


def stop(node: ClusterNode) -> None:
    """End the node's pods and programs: the kubelet first, because it would start the pods again."""
    daemons.stop(node.folder, "kubelet")
    daemons.stop(node.folder, "proxy")
    if daemons.alive(node.folder, "containerd"):
        _end_pods(node)
    daemons.stop(node.folder, "containerd")
    _end_strays(node)


def remove_cgroups(name: str) -> None:
    """Remove a control group with all below it, where nothing runs in it any more, in every hierarchy."""
    for hierarchy in HIERARCHIES.iterdir():
        groups = sorted((hierarchy / name).rglob("*/"), key=lambda path: len(path.parts), reverse=True)
        for group in [*groups, hierarchy / name]:
            if group.is_dir():
                group.rmdir()


def _make_cgroups(node: ClusterNode) -> None:
    for hierarchy in HIERARCHIES.iterdir():
        if hierarchy.is_symlink() or not (hierarchy / "cgroup.procs").exists():
            continue
        group = hierarchy
        for part in pathlib.PurePath(node.cgroup).parts:
            parent, group = group, group / part
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (parent / name).exists():
                    (group / name).write_text((parent / name).read_text())


def _end_pods(node: ClusterNode) -> None:
    deadline = time.monotonic() + READY_S
    while tasks := _tasks(node):
        for task in tasks:
            subprocess.run(node.runtime("tasks", "delete", "--force", task), capture_output=True, check=False)
        if time.monotonic() > deadline:
            raise ClusterError(f"containers of {node.name} do not end: {', '.join(tasks)}")
    done = subprocess.run(node.runtime("containers", "list", "--quiet"), capture_output=True, text=True, check=False)
    for container in done.stdout.split():
        subprocess.run(node.runtime("containers", "delete", container), capture_output=True, check=False)


def _tasks(node: ClusterNode) -> list[str]:
    done = subprocess.run(node.runtime("tasks", "list", "--quiet"), capture_output=True, text=True, check=False)
    return done.stdout.split()


def _end_strays(node: ClusterNode) -> None:
    """End what containerd left: its shims, and processes of pods that it no longer knows."""
    for group in HIERARCHIES.glob(f"*/{node.cgroup}/**/cgroup.procs"):
        for pid in group.read_text(encoding="utf-8").split():
            subprocess.run(["kill", "-KILL", pid], capture_output=True, check=False)
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if command[0].endswith(b"containerd-shim-runc-v2") and str(node.socket).encode() in command:
            subprocess.run(["kill", "-KILL", path.parent.name], capture_output=True, check=False)
