"""The control plane: etcd, API server, controllers, scheduler and names, in the first node's network."""

import pathlib

from cluster import daemons, settings
from cluster.layout import API_PORT, SERVICE_RANGE, Layout

ORDER = ("dns", "scheduler", "controllers", "apiserver", "etcd")
"""In which its programs end."""


def start_api(cluster: Layout, programs: pathlib.Path) -> None:
    """Start etcd and the API server."""
    _start(cluster, "etcd", _etcd(cluster, programs))
    _start(cluster, "apiserver", _api_server(cluster, programs))


def start_controllers(cluster: Layout, programs: pathlib.Path, coredns: pathlib.Path) -> None:
    """Start what acts on the API server's objects."""
    _start(cluster, "controllers", _controllers(cluster, programs))
    _start(cluster, "scheduler", [str(programs / "kube-scheduler"), *_component(cluster, "scheduler")])
    path = cluster.folder / "Corefile"
    path.write_text(settings.names(cluster), encoding="utf-8")
    _start(cluster, "dns", [str(coredns / "coredns"), "-conf", str(path)])


def stop(cluster: Layout) -> None:
    """End the control plane, if it runs."""
    for name in ORDER:
        daemons.stop(cluster.folder, name)


def _start(cluster: Layout, name: str, command: list[str]) -> None:
    daemons.start(cluster.folder, name, cluster.first.inside(*command))


def _etcd(cluster: Layout, programs: pathlib.Path) -> list[str]:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        str(programs / "etcd"),
        f"--data-dir={cluster.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _api_server(cluster: Layout, programs: pathlib.Path) -> list[str]:
    keys = cluster.keys
    return [
        str(programs / "kube-apiserver"),
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={cluster.first.address}",
        "--bind-address=0.0.0.0",
        f"--secure-port={API_PORT}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--client-ca-file={keys / 'ca.crt'}",
        f"--tls-cert-file={keys / 'apiserver.crt'}",
        f"--tls-private-key-file={keys / 'apiserver.key'}",
        f"--service-account-key-file={keys / 'accounts.pub'}",
        f"--service-account-signing-key-file={keys / 'accounts.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--kubelet-client-certificate={keys / 'apiserver-kubelet.crt'}",
        f"--kubelet-client-key={keys / 'apiserver-kubelet.key'}",
        f"--kubelet-certificate-authority={keys / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
    ]


def _controllers(cluster: Layout, programs: pathlib.Path) -> list[str]:
    keys = cluster.keys
    return [
        str(programs / "kube-controller-manager"),
        *_component(cluster, "controllers"),
        f"--root-ca-file={keys / 'ca.crt'}",
        f"--cluster-signing-cert-file={keys / 'ca.crt'}",
        f"--cluster-signing-key-file={keys / 'ca.key'}",
        f"--service-account-private-key-file={keys / 'accounts.key'}",
        "--use-service-account-credentials=true",
        "--node-monitor-period=2s",
        "--node-monitor-grace-period=16s",
    ]


def _component(cluster: Layout, name: str) -> list[str]:
    path = cluster.kubeconfig(name)
    return [
        f"--kubeconfig={path}",
        f"--authentication-kubeconfig={path}",
        f"--authorization-kubeconfig={path}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    ]
