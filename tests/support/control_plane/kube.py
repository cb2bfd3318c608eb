"""A real control plane of Kubernetes on loopback: etcd and kube-apiserver, built by scripts/kube_tools.sh.

Nothing runs pods here, and without controllers no service account or garbage collection exists; what the API server
itself does (schemas, CEL, admission policies, server-side apply, watches, leases, RBAC) is the real thing.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import secrets
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import yaml
from ports import reserved_ports

from megatronapp_common.processes import terminate

ROOT = pathlib.Path(__file__).parents[3]
START_S = 120
STOP_S = 20
POLL_S = 0.05
ADMIN = "admin"
_NUMBERS = itertools.count()
_DIE_WITH_TESTS = ("setpriv", "--pdeathsig", "KILL")
_COLLECT_RARELY = {"GOGC": "400"}
"""Lets Go's heap grow to five times what lives, for a sixth of the API server's processor time."""


class KubeError(Exception):
    """Failure of a program of the control plane to start."""


def programs(group: str = "api") -> pathlib.Path:
    """The folder with the programs of a group ("api", "api-1.30", "cluster"); builds them the first time."""
    script = ROOT / "scripts" / "kube_tools.sh"
    done = subprocess.run([script, group], check=True, stdout=subprocess.PIPE, text=True)
    return pathlib.Path(done.stdout.strip())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlPlane:
    """A running API server and how to talk to it."""

    folder: pathlib.Path
    programs: pathlib.Path
    url: str
    tokens: Mapping[str, str]
    """Bearer token of each user."""

    @property
    def certificate(self) -> pathlib.Path:
        """Certificate that the API server shows, which is its own authority."""
        return self.folder / "certificates" / "apiserver.crt"

    def context(self) -> ssl.SSLContext:
        """TLS context that trusts the API server."""
        return ssl.create_default_context(cafile=str(self.certificate))

    def client(self, user: str = ADMIN) -> httpx.Client:
        """An HTTP client with the user's token."""
        headers = {"Authorization": f"Bearer {self.tokens[user]}"}
        return httpx.Client(base_url=self.url, headers=headers, verify=self.context(), timeout=180)

    def kubeconfig(self, user: str = ADMIN) -> pathlib.Path:
        """A file for kubectl and clients, written once: an operator may read it at any time."""
        path = self.folder / f"{user}.kubeconfig"
        if path.exists():
            return path
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    def new_namespace(self, prefix: str) -> str:
        """The name of a namespace made for a test."""
        name = f"{prefix}-{next(_NUMBERS)}"
        with self.client() as client:
            client.post("/api/v1/namespaces", json={"metadata": {"name": name}}).raise_for_status()
        return name

    def kubectl(self, *arguments: str, stdin: Any = None, user: str = ADMIN) -> "subprocess.CompletedProcess[str]":
        """Run kubectl; `stdin` is an object that it reads as JSON from `-f -`."""
        command = [str(self.programs / "kubectl"), "--kubeconfig", str(self.kubeconfig(user)), *arguments]
        text = None if stdin is None else json.dumps(stdin)
        environment = {"HOME": str(self.folder), "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment)


@contextlib.contextmanager
def control_plane(
    folder: pathlib.Path, *, users: tuple[str, ...] = (), flags: tuple[str, ...] = (), group: str = "api"
) -> Iterator[ControlPlane]:
    """Start etcd and the API server, and remove both at the end. `users` have no rights but what RBAC gives them."""
    binaries = programs(group)
    tokens = {user: secrets.token_hex(16) for user in (ADMIN, *users)}
    _write_keys(folder, tokens)
    with (
        reserved_ports(3) as (etcd_port, peer_port, api_port),
        _program(folder, _etcd(binaries, folder, etcd_port, peer_port)) as etcd,
        _program(folder, [*_api_server(binaries, folder, etcd_port, api_port), *flags]) as server,
    ):
        plane = ControlPlane(folder=folder, programs=binaries, url=f"https://127.0.0.1:{api_port}", tokens=tokens)
        _wait_ready(plane, (etcd, server))
        yield plane


def _write_keys(folder: pathlib.Path, tokens: Mapping[str, str]) -> None:
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    rows = [f'{token},{user},{user},"{"system:masters" if user == ADMIN else ""}"' for user, token in tokens.items()]
    (folder / "tokens.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _etcd(binaries: pathlib.Path, folder: pathlib.Path, port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(binaries / "etcd"),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _api_server(binaries: pathlib.Path, folder: pathlib.Path, etcd_port: int, port: int) -> list[str]:
    key = folder / "service-accounts.key"
    return [
        str(binaries / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/16",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--disable-admission-plugins=ServiceAccount",  # its accounts are made by a controller
        "--endpoint-reconciler-type=none",
        "--allow-privileged=true",
    ]


@contextlib.contextmanager
def _program(folder: pathlib.Path, command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    name = pathlib.Path(command[0]).name
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*_DIE_WITH_TESTS, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=os.environ | _COLLECT_RARELY,
        )
        try:
            yield process
        finally:
            terminate(process, STOP_S)


def _wait_ready(plane: ControlPlane, processes: tuple["subprocess.Popen[bytes]", ...]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for process in processes:
            if process.poll() is not None:
                raise KubeError(
                    f"{_name(process)} ended with code {process.returncode}:\n{_log(plane.folder, process)}"
                )
        if plane.certificate.exists() and _answers(plane):
            return
        time.sleep(POLL_S)
    logs = "\n".join(_log(plane.folder, process) for process in processes)
    raise KubeError(f"the API server was not ready within {START_S} s:\n{logs}")


def _answers(plane: ControlPlane) -> bool:
    try:
        with plane.client() as client:
            return client.get("/readyz").status_code == httpx.codes.OK
    except (httpx.TransportError, ssl.SSLError):
        return False


def _name(process: "subprocess.Popen[bytes]") -> str:
    return pathlib.Path(str(process.args[len(_DIE_WITH_TESTS)])).name  # type: ignore[index]


def _log(folder: pathlib.Path, process: "subprocess.Popen[bytes]") -> str:
    return (folder / f"{_name(process)}.log").read_text(encoding="utf-8", errors="replace")[-2000:]
