"""What the operator is started with."""

import argparse
import dataclasses
import os
import pathlib
import socket
from collections.abc import Sequence

from megatronapp_common.names import OPERATOR_PORT
from megatronapp_operator.backends.kubernetes.render.settings import RenderSettings
from megatronapp_operator.errors import SettingsError
from megatronapp_operator.keys import KeyRing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """All of it."""

    render: RenderSettings
    keys: KeyRing
    """The installation's, from which the secret of each job follows."""
    identity: str
    """Who leads, in the lease: no two processes share it."""
    lease_namespace: str
    lease_name: str
    namespaces: tuple[str, ...] = ()
    """The watched ones; none: all."""
    port: int = OPERATOR_PORT
    concurrency: int = 50
    """Requests to the API server that are under way at a time."""
    workers: int = 16
    """Jobs that are looked at at a time."""
    resync_s: float = 300.0
    """How often all is listed again, in case a watch has lost something."""
    kubeconfig: str | None = None


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m megatronapp_operator.controller", description="Run the operator of MegatronJobs on a cluster."
    )
    parser.add_argument("--watch-namespaces", default="", metavar="A,B", help="namespaces to watch; left out: all")
    parser.add_argument("--operator-namespace", default="megatronapp", help="where operator and door run")
    parser.add_argument("--lease-namespace", help="where the lease is; left out: the operator's namespace")
    parser.add_argument("--lease-name", default="megatronapp-operator")
    parser.add_argument("--trainer-image", required=True, help="image of workers that name none")
    parser.add_argument("--analyzer-image", required=True, help="image of agents and hubs that name none")
    parser.add_argument("--image-pull-policy", default="IfNotPresent", choices=["Always", "IfNotPresent", "Never"])
    parser.add_argument("--key-file", required=True, type=pathlib.Path, help="keys of 64 hex digits, the newest first")
    parser.add_argument("--port", type=int, default=OPERATOR_PORT, help="of metrics and probes; 0: a free one")
    parser.add_argument("--concurrency", type=int, default=50, help="requests under way at a time")
    parser.add_argument("--cluster-domain", default="cluster.local")
    parser.add_argument("--node-access", action="store_true", help="the operator may read nodes")
    parser.add_argument("--prometheus-namespace", default="", help="whose Prometheus may scrape hubs")
    for whom in ("prometheus", "operator", "door"):
        parser.add_argument(f"--{whom}-labels", default="", metavar="K=V,..", help=f"labels of the {whom}'s pods")
    parser.add_argument("--resync-seconds", type=float, default=300.0, help="how often all is listed again")
    parser.add_argument("--kubeconfig", help="outside a cluster: who the operator is")
    return parser


def parse(arguments: Sequence[str] | None = None) -> ControllerSettings:
    """Settings from the command line. Raises SettingsError."""
    given = build_parser().parse_args(arguments)
    render = RenderSettings(
        trainer_image=given.trainer_image,
        analyzer_image=given.analyzer_image,
        image_pull_policy=given.image_pull_policy,
        cluster_domain=given.cluster_domain,
        operator_namespace=given.operator_namespace,
        operator_labels=_labels("--operator-labels", given.operator_labels),
        gateway_labels=_labels("--door-labels", given.door_labels),
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
