"""A Kubernetes of real nodes on this machine: brought up, used and taken down again without a trace."""

import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import kube
from cluster import control, daemons, node
from cluster.images import IMAGES, OURS, TAKEN, Builder, copy_images, name
from cluster.keys import write_keys
from cluster.layout import PAUSE_IMAGE, ClusterError, Layout, default_folder, layout
from cluster.network import make_network, remove_network

MOST_NODES = 2
START_S = 120
POLL_S = 0.1
KERNEL = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")
"""Kernel settings that a kubelet changes on the machine itself."""
LEFTOVERS = ("/var/lib/kubelet", "/var/log/containers", "/var/lib/cni")
"""Folders that a kubelet and CNI plugins make outside of the folders they are given."""


class Cluster:
    """Cluster whose programs run."""

    def __init__(self, places: Layout, programs: pathlib.Path) -> None:
        self.layout = places
        self.programs = programs

    def inside(self, *program: object, node_index: int = 1, seconds: float = 300) -> "subprocess.CompletedProcess[str]":
        """Run a command in a node's network."""
        command = self.layout.nodes[node_index - 1].inside(*program)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 300) -> str:
        """Run kubectl and return its output. Raises ClusterError if it fails."""
        full = self.layout.first.inside(*self.command(), *arguments)
        done = subprocess.run(full, input=stdin, capture_output=True, text=True, check=False, timeout=seconds)
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def command(self) -> tuple[str, ...]:
        """kubectl with the administrator's rights, to be run inside the first node's network."""
        return (str(self.programs / "kubectl"), "--kubeconfig", str(self.layout.kubeconfig("admin")))

    def get(self, *arguments: str) -> dict[str, Any]:
        """An object, or a list of them."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def apply(self, *documents: dict[str, Any], namespace: str = "default") -> None:
        """Apply these objects with kubectl."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
        self.kubectl("apply", "-n", namespace, "-f", "-", stdin=text)

    def namespace(self, name: str, level: str = "restricted") -> None:
        """Make a namespace of a level of pod security, and wait for its account."""
        labels = {"pod-security.kubernetes.io/enforce": level}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        self.wait(lambda: bool(self.get("serviceaccounts", "-n", name)["items"]), f"the account of {name}")

    def ready(self) -> bool:
        """Return whether all nodes are ready. Raises ClusterError if a kubelet has ended."""
        for member in self.layout.nodes:
            if not daemons.alive(member.folder, "kubelet"):
                raise ClusterError(f"the kubelet of {member.name} ended:\n{daemons.tail(member.folder, 'kubelet')}")
        states = [
            condition["status"]
            for item in self.get("nodes")["items"]
            for condition in item["status"].get("conditions", [])
            if condition["type"] == "Ready"
        ]
        return states == ["True"] * len(self.layout.nodes)

    def wait(self, done: "Any", what: str, seconds: float = START_S) -> None:
        """Wait until something is true. Raises ClusterError with what was waited for."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise ClusterError(f"{what}: not within {seconds:.0f} s\n{self.problems()}")
            time.sleep(POLL_S)

    def problems(self) -> str:
        """Return what the cluster reports about pods that are not well."""
        with contextlib.suppress(ClusterError, subprocess.TimeoutExpired):
            pods = self.kubectl("get", "pods", "-A", "-o", "wide", seconds=20)
            events = self.kubectl("get", "events", "-A", "--field-selector=type!=Normal", seconds=20)
            return f"{pods}\n{events[-4000:]}"
        return "the API server does not answer"


def up(folder: pathlib.Path | None = None, *, nodes: int = MOST_NODES, images: Sequence[str] = OURS) -> Cluster:
    """Bring a cluster up; take down an earlier one first, whole or incomplete, but keep its images."""
    places = layout(folder or default_folder(), nodes)
    down(places.folder, keep_images=True)
    builder = Builder()
    builder.pause()
    if images:
        builder.build()
    programs, coredns = kube.programs("cluster"), kube.programs("coredns")
    _prepare(places)
    control.start_api(places, programs)
    _take_images(places, builder, (PAUSE_IMAGE, *map(name, images)))
    for member in places.nodes:
        node.start_runtime(member)
    cluster = Cluster(places, programs)
    _wait_api(cluster)
    control.start_controllers(places, programs, coredns)
    for member in places.nodes:
        node.start_proxy(places, member, programs)
        node.start_kubelet(places, member, programs)
    cluster.wait(cluster.ready, "nodes Ready")
    return cluster


def down(folder: pathlib.Path | None = None, *, keep_images: bool = False) -> None:
    """Take down all that exists of a cluster, also after a failure: programs, pods, mounts, networks, control groups,
    folders."""
    places = layout(folder or default_folder(), MOST_NODES)
    for member in places.nodes:
        node.stop(member)
    control.stop(places)
    _unmount(places.folder)
    remove_network(places)
    node.remove_cgroups(places.cgroup)
    if not places.folder.exists():
        return
    _restore_host_settings(places.folder)
    for path in places.folder.iterdir():
        if keep_images and path.name in {member.name for member in places.nodes}:
            _empty_node(path)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if not keep_images:
        places.folder.rmdir()


@contextlib.contextmanager
def running(
    folder: pathlib.Path | None = None, *, nodes: int = MOST_NODES, images: Sequence[str] = OURS
) -> Iterator[Cluster]:
    """A cluster for the length of a block."""
    try:
        yield up(folder, nodes=nodes, images=images)
    finally:
        down(folder)


def remains(folder: pathlib.Path | None = None) -> list[str]:
    """Return what is left of a cluster: programs, networks, control groups, mounts, folders."""
    places = layout(folder or default_folder(), MOST_NODES)
    found = [f"network {member.namespace}" for member in places.nodes if member.network.exists()]
    found += [f"control group {path}" for path in node.HIERARCHIES.glob(f"*/{places.cgroup}")]
    found += [f"mount {mount}" for mount in _mounts(places.folder)]
    found += [f"program {program}" for program in _programs(places.folder)]
    return [*found, f"folder {places.folder}"] if places.folder.exists() else found


def standing(folder: pathlib.Path | None = None, *, nodes: int = MOST_NODES) -> Cluster:
    """Return the running cluster. Raises ClusterError if none runs."""
    places = layout(folder or default_folder(), nodes)
    if not daemons.alive(places.folder, "apiserver"):
        raise ClusterError(f"no cluster stands in {places.folder}")
    return Cluster(places, kube.programs("cluster"))


def _prepare(places: Layout) -> None:
    for member in places.nodes:
        member.folder.mkdir(parents=True, exist_ok=True)
    (places.folder / "resolv.conf").write_text("", encoding="utf-8")
    _save_host_settings(places.folder)
    write_keys(places)
    make_network(places)


def _take_images(places: Layout, builder: Builder, images: Sequence[str]) -> None:
    """Copy the images into the first node, and from there to the others."""
    first, *others = places.nodes
    node.start_runtime(first)
    taken = [builder.give(image, first) for image in images]
    node.stop(first)
    for other in others:
        if any(taken) or not (other.folder / IMAGES).exists():
            copy_images(first, other)


def _wait_api(cluster: Cluster) -> None:
    def answers() -> bool:
        if not daemons.alive(cluster.layout.folder, "apiserver"):
            raise ClusterError(f"the API server ended:\n{daemons.tail(cluster.layout.folder, 'apiserver')}")
        return cluster.inside(*cluster.command(), "get", "--raw=/readyz").stdout == "ok"

    cluster.wait(answers, "the API server")


def _mounts(folder: pathlib.Path) -> list[str]:
    mounts = [line.split()[1] for line in pathlib.Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    return sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True)


def _programs(folder: pathlib.Path) -> Iterator[str]:
    """Processes that name the folder."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"{folder}/" in command:
                yield command


def _unmount(folder: pathlib.Path) -> None:
    for mount in _mounts(folder):
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


def _save_host_settings(folder: pathlib.Path) -> None:
    kernel = {key: pathlib.Path("/proc/sys", key).read_text(encoding="utf-8") for key in KERNEL}
    absent = [path for path in LEFTOVERS if not pathlib.Path(path).exists()]
    (folder / "before.json").write_text(json.dumps({"kernel": kernel, "absent": absent}), encoding="utf-8")


def _restore_host_settings(folder: pathlib.Path) -> None:
    path = folder / "before.json"
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for key, value in before["kernel"].items():
        pathlib.Path("/proc/sys", key).write_text(value, encoding="utf-8")
    for left in before["absent"]:
        shutil.rmtree(left, ignore_errors=True)


def _empty_node(folder: pathlib.Path) -> None:
    """Remove all of a node but its images."""
    for path in folder.iterdir():
        if path.name not in {IMAGES, TAKEN}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(arguments: Sequence[str]) -> int:
    """`up [--no-images]`, `down [--keep-images]`."""
    if list(arguments[:1]) == ["up"]:
        cluster = up(images=() if "--no-images" in arguments else OURS)
        print("kubectl is:", *cluster.layout.first.inside(*cluster.command()))
        return 0
    if list(arguments[:1]) == ["down"]:
        down(keep_images="--keep-images" in arguments)
        return 0
    print("usage: cluster up [--no-images] | down [--keep-images]", file=sys.stderr)
    return 2
