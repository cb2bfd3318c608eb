"""Names, addresses and folders of the test cluster. Everything it makes is found again from its folder alone."""

import dataclasses
import os
import pathlib

ROOT = pathlib.Path(__file__).parents[3]
API_PORT = 6443
SERVICE_RANGE = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
POD_RANGE = "10.244.0.0/16"
PAUSE_IMAGE = "registry.local/pause:1"
PREFIX = "megatronapp-e2e"
"""Prefix of all names that are visible on the machine."""


class ClusterError(Exception):
    """The cluster cannot be brought up, or does not do what it is asked."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """Pretended machine: a network namespace with a separate container runtime and kubelet."""

    index: int
    """Counted from 1."""
    folder: pathlib.Path

    @property
    def name(self) -> str:
        """Name under which the API server knows it."""
        return f"node-{self.index}"

    @property
    def namespace(self) -> str:
        """Name of its network namespace."""
        return f"{name_of(self.folder.parent)}-{self.index}"

    @property
    def network(self) -> pathlib.Path:
        """Path under which the kernel shows its network namespace."""
        return pathlib.Path("/run/netns", self.namespace)

    @property
    def address(self) -> str:
        """IPv4 address of the node."""
        return f"10.250.0.{self.index}"

    @property
    def pods(self) -> str:
        """Addresses of its pods."""
        return f"10.244.{self.index}.0/24"

    @property
    def socket(self) -> pathlib.Path:
        """Socket of its container runtime."""
        return self.folder / "containerd.sock"

    @property
    def cgroup(self) -> str:
        """Parent of all its pods, in every hierarchy."""
        return f"{name_of(self.folder.parent)}/{self.name}"

    def inside(self, *command: object) -> list[str]:
        """A command that runs in the node's network; `ip netns exec` would hide the control groups."""
        return ["nsenter", f"--net={self.network}", *map(str, command)]

    def runtime(self, *arguments: object) -> list[str]:
        """A command of containerd's client, among the images and containers of the kubelet."""
        return ["ctr", "--address", str(self.socket), "--namespace", "k8s.io", *map(str, arguments)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Paths of all files of one cluster."""

    folder: pathlib.Path
    nodes: tuple[ClusterNode, ...]

    @property
    def cgroup(self) -> str:
        """Parent of the control groups of all nodes."""
        return name_of(self.folder)

    @property
    def keys(self) -> pathlib.Path:
        """Certificates, keys and kubeconfigs."""
        return self.folder / "keys"

    @property
    def first(self) -> ClusterNode:
        """The node in whose network the control plane runs."""
        return self.nodes[0]

    def kubeconfig(self, user: str) -> pathlib.Path:
        """Return the kubeconfig by which a component, or "admin", reaches the API server."""
        return self.keys / f"{user}.kubeconfig"


def name_of(folder: pathlib.Path) -> str:
    """Return the name of network namespaces and control groups of a cluster: two clusters may run in parallel."""
    return folder.name if folder.name.startswith(PREFIX) else f"{PREFIX}-{folder.name}"


def layout(folder: pathlib.Path, nodes: int) -> Layout:
    """Return the layout of a cluster with this number of nodes."""
    members = (ClusterNode(index=index, folder=folder / f"node-{index}") for index in range(1, nodes + 1))
    return Layout(folder=folder, nodes=tuple(members))


def default_folder() -> pathlib.Path:
    """Return the default folder of the cluster: on a disk, for overlays need one."""
    return pathlib.Path(os.environ.get("MEGATRONAPP_E2E_FOLDER", "/var/lib/megatronapp-e2e"))
