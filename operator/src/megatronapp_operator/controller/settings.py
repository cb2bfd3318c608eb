"""Command line of the operator."""

import argparse
import dataclasses
import os
import pathlib
import socket
from collections.abc import Sequence

from megatronapp_common.command_parser import add_renamed_option
from megatronapp_common.names import OPERATOR_PORT
from megatronapp_operator.backends.kubernetes.render.settings import RenderSettings
from megatronapp_operator.errors import SettingsError
from megatronapp_operator.keys import KeyRing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Settings of one operator process."""

    render: RenderSettings
    keys: KeyRing
    """Keys of the installation, from which the secret of each job is derived."""
    identity: str
    """Identity of this process in the lease; no two processes have the same."""
    lease_namespace: str
    lease_name: str
    namespaces: tuple[str, ...] = ()
    """Watched namespaces; empty: all."""
    port: int = OPERATOR_PORT
    concurrency: int = 50
    """Requests to the API server in progress at a time."""
    workers: int = 16
    """Jobs that are reconciled at a time."""
    resync_s: float = 300.0
    """Seconds between full lists, in case a watch has lost an event."""
    kubeconfig: str | None = None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the operator's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m megatronapp_operator.controller", description="Run the operator of MegatronJobs on a cluster."
    )
    parser.add_argument("--watch-namespaces", default="", metavar="A,B", help="namespaces to watch (default: all)")
    parser.add_argument("--operator-namespace", default="megatronapp", help="namespace of operator and gateway")
    parser.add_argument("--lease-namespace", help="namespace of the lease (default: the operator's namespace)")
    parser.add_argument("--lease-name", default="megatronapp-operator")
    parser.add_argument("--trainer-image", required=True, help="image of workers that name none")
    parser.add_argument("--analyzer-image", required=True, help="image of agents and hubs that name none")
    parser.add_argument("--image-pull-policy", default="IfNotPresent", choices=["Always", "IfNotPresent", "Never"])
    parser.add_argument("--key-file", required=True, type=pathlib.Path, help="keys of 64 hex digits, the newest first")
    parser.add_argument("--port", type=int, default=OPERATOR_PORT, help="port of metrics and probes; 0: a free one")
    parser.add_argument("--concurrency", type=int, default=50, help="requests in progress at a time")
    parser.add_argument("--cluster-domain", default="cluster.local")
    parser.add_argument("--node-access", action="store_true", help="the operator may read nodes")
    parser.add_argument("--prometheus-namespace", default="", help="namespace whose Prometheus may scrape hubs")
    for peer in ("prometheus", "operator", "gateway"):
        parser.add_argument(f"--{peer}-labels", default="", metavar="K=V,..", help=f"labels of the {peer}'s pods")
    add_renamed_option(parser, "--door-labels", "--gateway-labels")
    parser.add_argument("--resync-seconds", type=float, default=300.0, help="seconds between full lists")
    parser.add_argument("--kubeconfig", help="kubeconfig for running outside a cluster")
    return parser


def parse(arguments: Sequence[str] | None = None) -> ControllerSettings:
    """Parse settings from the command line. Raises SettingsError."""
    given = build_parser().parse_args(arguments)
    render = RenderSettings(
        trainer_image=given.trainer_image,
        analyzer_image=given.analyzer_image,
        image_pull_policy=given.image_pull_policy,
        cluster_domain=given.cluster_domain,
        operator_namespace=given.operator_namespace,
        operator_labels=_labels("--operator-labels", given.operator_labels),
        gateway_labels=_labels("--gateway-labels", given.gateway_labels),
        prometheus_namespace=given.prometheus_namespace or None,
        prometheus_labels=_labels("--prometheus-labels", given.prometheus_labels),
        node_access=given.node_access,
    )
    return ControllerSettings(
        render=render,
        keys=KeyRing.read(given.key_file),
        identity=f"{socket.gethostname()}_{os.getpid()}_{os.urandom(4).hex()}",
        lease_namespace=given.lease_namespace or given.operator_namespace,
        lease_name=given.lease_name,
        namespaces=tuple(name for name in given.watch_namespaces.split(",") if name),
        port=given.port,
        concurrency=given.concurrency,
        resync_s=given.resync_seconds,
        kubeconfig=given.kubeconfig,
    )


def _labels(flag: str, text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if any(not name or not equals for name, equals, _ in pairs):
        raise SettingsError(f"{flag} {text!r}: write labels as name=value, separated by commas")
    return {name: value for name, _, value in pairs}
