"""Network namespaces of the nodes: joined with each other by a bridge, and with no other network."""

import contextlib
import subprocess

from cluster.layout import ClusterNode, Layout

BRIDGE = "nodes"
SETTINGS = (
    "net.ipv4.ip_forward=1",
    "net.bridge.bridge-nf-call-iptables=1",
    "net.ipv4.conf.all.route_localnet=1",
)


def make_network(cluster: Layout) -> None:
    """Make the namespaces, join them, and add to each the routes to the others' pods."""
    for node in cluster.nodes:
        _run("ip", "netns", "add", node.namespace)
        _run(*node.inside("ip", "link", "set", "lo", "up"))
    first = cluster.first
    _run(*first.inside("ip", "link", "add", BRIDGE, "type", "bridge"))
    _address(first, BRIDGE)
    for node in cluster.nodes[1:]:
        _join(first, node)
    for node in cluster.nodes:
        for other in cluster.nodes:
            if other is not node:
                _run(*node.inside("ip", "route", "add", other.pods, "via", other.address))
        # Service addresses need a route before they are rewritten; it leads nowhere.
        _run(*node.inside("ip", "route", "add", "default", "via", first.address))
        _run(*node.inside("sysctl", "-q", "-w", *SETTINGS))


def remove_network(cluster: Layout) -> None:
    """Remove the namespaces that are there, with all in them."""
    for node in cluster.nodes:
        if node.network.exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", node.namespace)


def _join(first: ClusterNode, node: ClusterNode) -> None:
    port = f"to-{node.name}"
    link = ("type", "veth", "peer", "name", "eth0", "netns", node.namespace)
    _run("ip", "link", "add", port, "netns", first.namespace, *link)
    _run(*first.inside("ip", "link", "set", port, "master", BRIDGE, "up"))
    _address(node, "eth0")


def _address(node: ClusterNode, device: str) -> None:
    _run(*node.inside("ip", "address", "add", f"{node.address}/24", "dev", device))
    _run(*node.inside("ip", "link", "set", device, "up"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
