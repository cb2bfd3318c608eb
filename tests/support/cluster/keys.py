"""An authority, a certificate for each component, and kubeconfigs that name them."""

import pathlib
import subprocess

import yaml
from cluster.layout import API_PORT, FIRST_SERVICE, Layout

DAYS = 30
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
COMPONENTS = {
    "admin": "/O=system:masters/CN=admin",
    "controllers": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
    "dns": "/O=system:masters/CN=dns",
}


def write_keys(cluster: Layout) -> None:
    """Write all keys of a cluster into its folder."""
    cluster.keys.mkdir(mode=0o700)
    _authority(cluster.keys)
    _server(cluster)
    _certificate(cluster.keys, "apiserver-kubelet", "/O=system:masters/CN=apiserver-kubelet")
    for name, subject in COMPONENTS.items():
        _certificate(cluster.keys, name, subject)
        _kubeconfig(cluster, name)
    for node in cluster.nodes:
        subject = f"/O=system:nodes/CN=system:node:{node.name}"
        _certificate(cluster.keys, node.name, subject, f"DNS:{node.name},IP:{node.address}")
        _kubeconfig(cluster, node.name)
    _openssl(cluster.keys, "genrsa", "-out", "accounts.key", "2048")
    _openssl(cluster.keys, "rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")


def _server(cluster: Layout) -> None:
    names = [f"DNS:kubernetes{suffix}" for suffix in ("", ".default", ".default.svc")]
    addresses = [f"IP:{address}" for address in ("127.0.0.1", FIRST_SERVICE, cluster.first.address)]
    _certificate(cluster.keys, "apiserver", "/CN=kube-apiserver", ",".join(["DNS:localhost", *names, *addresses]))


def _authority(folder: pathlib.Path) -> None:
    days = ("-days", str(DAYS))
    _openssl(folder, "req", "-x509", *_EC, "-keyout", "ca.key", "-out", "ca.crt", *days, "-subj", "/CN=e2e")


def _certificate(folder: pathlib.Path, name: str, subject: str, names: str = "DNS:localhost") -> None:
    request = f"{name}.csr"
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={names}\n", encoding="utf-8")
    _openssl(folder, "req", *_EC, "-keyout", f"{name}.key", "-out", request, "-subj", subject)
    signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(DAYS))
    signing = ("x509", "-req", "-in", request, *signer, "-extfile", extensions.name, "-out", f"{name}.crt")
    _openssl(folder, *signing)


def _kubeconfig(cluster: Layout, user: str) -> None:
    keys = cluster.keys
    server = {"server": f"https://{cluster.first.address}:{API_PORT}", "certificate-authority": str(keys / "ca.crt")}
    who = {"client-certificate": str(keys / f"{user}.crt"), "client-key": str(keys / f"{user}.key")}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": server}],
        "users": [{"name": user, "user": who}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user}}],
        "current-context": "e2e",
    }
    cluster.kubeconfig(user).write_text(yaml.safe_dump(document), encoding="utf-8")


def _openssl(folder: pathlib.Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
