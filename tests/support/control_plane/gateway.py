"""Gateway as a real process, with service accounts, jobs and hubs on a real API server that it reads."""

import contextlib
import dataclasses
import ipaddress
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import kube
import yaml
from ports import reserved_ports
from shared_tls import SHARED_TLS

import megatronapp_native
from megatronapp_common.names import Env
from megatronapp_common.trace import BYTES_UNIT, NO_COMM, NO_MICROBATCH, Flag, RecordKind, TransferPath
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret

DEADLINE_S = 240.0
POLL_S = 0.05
STEPS = 8
"""Steps of the ranks whose hub `hub` runs."""
GROUP = "megatronapp.io"
JOBS = f"/apis/{GROUP}/v1alpha1/namespaces"
GATEWAY_RULES = (
    {"apiGroups": [GROUP], "resources": ["megatronjobs"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
)
"""Rights of the gateway in addition to system:auth-delegator."""
_ADDRESSES = (str(ipaddress.ip_address("127.77.0.1") + number) for number in itertools.count())


def create(plane: kube.ControlPlane, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST to the API server as its administrator; the answer."""
    return plane.create(path, body)


def account(plane: kube.ControlPlane, namespace: str, name: str, *, grants: Sequence[dict[str, Any]] = ()) -> str:
    """A service account with these rules in its namespace; a token of it."""
    core, rbac = f"/api/v1/namespaces/{namespace}", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    create(plane, f"{core}/serviceaccounts", {"metadata": {"name": name}})
    if grants:
        create(plane, f"{rbac}/roles", {"metadata": {"name": name}, "rules": list(grants)})
        bind(plane, namespace, name, {"kind": "Role", "name": name})
    made = create(plane, f"{core}/serviceaccounts/{name}/token", {"spec": {}})
    return str(made["status"]["token"])


def bind(
    plane: kube.ControlPlane, namespace: str, name: str, role: dict[str, str], *, everywhere: bool = False
) -> None:
    """Give a service account a role, in its namespace or everywhere."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    path = f"{rbac}/clusterrolebindings" if everywhere else f"{rbac}/namespaces/{namespace}/rolebindings"
    body = {
        "metadata": {"name": f"{namespace}-{name}-{role['name'].replace(':', '-')}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", **role},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    create(plane, path, body)


def on_jobs(*verbs: str) -> dict[str, Any]:
    """A rule about MegatronJobs."""
    return {"apiGroups": [GROUP], "resources": ["megatronjobs"], "verbs": list(verbs)}


def kubeconfig(
    plane: kube.ControlPlane, folder: pathlib.Path, token: str, *, namespace: str = "default"
) -> pathlib.Path:
    """A kubeconfig with this token."""
    document = yaml.safe_load(plane.kubeconfig().read_text(encoding="utf-8"))
    document["users"] = [{"name": "user", "user": {"token": token}}]
    document["contexts"] = [{"name": "test", "context": {"cluster": "test", "user": "user", "namespace": namespace}}]
    path = folder / f"kubeconfig-{len(list(folder.iterdir()))}"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def make_authority(folder: pathlib.Path) -> pathlib.Path:
    """Make a certificate authority for users; the API server takes its file as --client-ca-file."""
    key, certificate = folder / "people.key", folder / "people.crt"
    self_signed = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=people",
    )
    _openssl(*self_signed, "-keyout", str(key), "-out", str(certificate))
    return certificate


def certified(plane: kube.ControlPlane, folder: pathlib.Path, user: str, *, namespace: str) -> pathlib.Path:
    """Write a kubeconfig of a user who shows a certificate and has no token."""
    key, request, certificate = (folder / f"{user}.{end}" for end in ("key", "csr", "crt"))
    signing = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={user}")
    _openssl(*signing, "-keyout", str(key), "-out", str(request))
    authority = ("-CA", str(plane.folder / "people.crt"), "-CAkey", str(plane.folder / "people.key"))
    _openssl("x509", "-req", "-in", str(request), *authority, "-set_serial", "1", "-out", str(certificate))
    path = kubeconfig(plane, folder, "none", namespace=namespace)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    document["users"][0]["user"] = {"client-certificate": str(certificate), "client-key": str(key)}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gateway:
    """Gateway process and its address."""

    url: str
    key: str
    log: pathlib.Path
    hub_port: int
    metrics_port: int

    def client(self, token: str | None = None, **how: Any) -> httpx.Client:
        """Return a client with a token, or with none."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        how = {"timeout": DEADLINE_S, "trust_env": False, "verify": SHARED_TLS, **how}
        return httpx.Client(base_url=self.url, headers=headers, **how)

    def job_token(self, uid: str, role: TokenRole = TokenRole.VIEWER) -> str:
        """A token of a job."""
        return derive_token(job_secret(self.key, uid), role)


@contextlib.contextmanager
def gateway(
    plane: kube.ControlPlane,
    folder: pathlib.Path,
    *,
    reviews: bool = True,
    page: bool = True,
    built: pathlib.Path | None = None,
    flags: Sequence[str] = (),
) -> Iterator[Gateway]:
    """Start a gateway with the rights of the chart and the built page, or a small one, and stop it at the end."""
    namespace = f"gateway-{'reviews' if reviews else 'tokens'}-{os.getpid()}-{folder.name}".replace("_", "-")
    create(plane, "/api/v1/namespaces", {"metadata": {"name": namespace}})
    rules = {"metadata": {"name": namespace}, "rules": list(GATEWAY_RULES)}
    create(plane, "/apis/rbac.authorization.k8s.io/v1/clusterroles", rules)
    token = account(plane, namespace, "gateway")
    for role in (namespace, *(["system:auth-delegator"] if reviews else [])):
        bind(plane, namespace, "gateway", {"kind": "ClusterRole", "name": role}, everywhere=True)
    key = "ab" * 32
    (folder / "key").write_text(key + "\n", encoding="utf-8")
    dist = folder / "dist"
    (dist / "assets").mkdir(parents=True)
    (dist / "index.html").write_text("<!doctype html><html><head><title>page</title></head></html>", encoding="utf-8")
    (dist / "assets" / "app-1.js").write_text("1", encoding="utf-8")
    command = [
        *flags,
        f"--kubeconfig={kubeconfig(plane, folder, token)}",
        f"--key-file={folder / 'key'}",
        "--host=127.0.0.1",
    ]
    command += ([] if reviews else ["--no-reviews"]) + ([f"--frontend={built or dist}"] if page else [])
    log = folder / "gateway.log"
    with reserved_ports(3) as (port, hub_port, metrics_port):
        command += [f"--port={port}", f"--hub-port={hub_port}", f"--metrics-port={metrics_port}"]
        running = Gateway(
            url=f"http://127.0.0.1:{port}", key=key, log=log, hub_port=hub_port, metrics_port=metrics_port
        )
        with process([sys.executable, "-m", "megatronapp_operator.gateway", *command], log), running.client() as client:
            wait_for(lambda: _ready(client), log)
            yield running


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def process(command: list[str], log: pathlib.Path, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that dies with the test."""
    with log.open("ab") as file:
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdout=file, stderr=file, env=os.environ | environment
        )
        try:
            yield child
        finally:
            child.terminate()
            child.wait(DEADLINE_S)


def wait_for(probe: Any, log: pathlib.Path | None = None) -> None:
    """Wait until `probe` is true."""
    pause, end = threading.Event(), time.monotonic() + DEADLINE_S
    while not probe():
        text = "" if log is None else log.read_text(encoding="utf-8", errors="replace")[-3000:]
        assert time.monotonic() < end, f"waited {DEADLINE_S:g} s in vain\n{text}"
        pause.wait(POLL_S)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatewayJob:
    """A MegatronJob on the API server, and the address that its hub's pod has."""

    namespace: str
    name: str
    uid: str
    document: dict[str, Any]
    address: str

    @property
    def path(self) -> str:
        """Return the path of the job below the gateway."""
        return f"/api/v1/jobs/{self.namespace}/{self.name}"


def make_job(plane: kube.ControlPlane, namespace: str, name: str, *, hub: bool = True) -> GatewayJob:
    """A job, and the pod of its hub as the operator makes it and a kubelet reports it (nothing runs in it)."""
    document = yaml.safe_load((kube.ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"))
    document["metadata"] = {"name": name}
    document = create(plane, f"{JOBS}/{namespace}/megatronjobs", document)
    job = GatewayJob(
        namespace=namespace,
        name=name,
        uid=document["metadata"]["uid"],
        document=document,
        address=next(_ADDRESSES),
    )
    if hub:
        make_pod(plane, job, f"{name}-hub", address=job.address)
    return job


def set_status(plane: kube.ControlPlane, job: GatewayJob, **status: Any) -> None:
    """Write the status that the operator reports of a job."""
    patch(plane, f"{JOBS}/{job.namespace}/megatronjobs/{job.name}/status", {"status": status})


def patch(plane: kube.ControlPlane, path: str, body: dict[str, Any]) -> None:
    """A merge patch as the administrator."""
    with plane.client() as client:
        kind = {"Content-Type": "application/merge-patch+json"}
        answer = client.patch(path, content=json.dumps(body), headers=kind)
    assert answer.is_success, answer.text


def make_pod(
    plane: kube.ControlPlane, job: GatewayJob, name: str, *, address: str, owner: str | None = None, **more: Any
) -> None:
    """A running pod that belongs to the job (or to another owner's uid)."""
    pods = f"/api/v1/namespaces/{job.namespace}/pods"
    reference = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "MegatronJob",
        "name": job.name,
        "uid": owner or job.uid,
        "controller": True,
    }
    metadata = {"name": name, "ownerReferences": [reference], "labels": {f"{GROUP}/job-uid": job.uid}}
    spec = {"containers": [{"name": "trainer", "image": "none"}]} | more
    create(plane, pods, {"metadata": metadata, "spec": spec})
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    patch(plane, f"{pods}/{name}/status", {"status": status})


@contextlib.contextmanager
def hub(job: GatewayJob, folder: pathlib.Path, *, port: int, key: str, transfers: bool = False) -> Iterator[None]:
    """The real hub of a job with a real agent over real rings of a small pipeline, where its pod would be."""
    folder.mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(job.document), encoding="utf-8")
    (folder / "secret").write_text(job_secret(key, job.uid) + "\n", encoding="utf-8")
    url = f"http://{job.address}:{port}"
    environment = {
        Env.SECRET_FILE: str(folder / "secret"),
        Env.JOB: job.name,
        Env.JOB_UID: job.uid,
        Env.ATTEMPT: "0",
        Env.WORKER_INDEX: "0",
        Env.NODE_NAME: "node-0",
        Env.ADDRESS: "127.0.0.2",
        Env.SHM_DIR: str(folder),
        Env.SHM_PREFIX: "ring",
        Env.HUB_URL: url,
    }
    named = {str(name.value): value for name, value in environment.items()}
    flags = [f"--host={job.address}", f"--port={port}", f"--job-file={folder / 'job.yaml'}", f"--state-dir={folder}"]
    command, log = [sys.executable, "-m"], folder / "hub.log"
    with (
        process([*command, "megatronapp_analyzer.hub", *flags], log, **named),
        rings(folder, transfers=transfers),
        process([*command, "megatronapp_analyzer.agent"], log, **named),
    ):
        headers = {"Authorization": f"Bearer {viewer(key, job)}"}
        with httpx.Client(trust_env=False, headers=headers, verify=SHARED_TLS, timeout=DEADLINE_S) as client:
            wait_for(lambda: _has_steps(client, url), log)
        yield


def viewer(key: str, job: GatewayJob) -> str:
    """The viewer's token of a job."""
    return derive_token(job_secret(key, job.uid), TokenRole.VIEWER)


def _has_steps(client: httpx.Client, url: str) -> bool:
    try:
        answer = client.get(f"{url}/api/v1/steps")
        judges = client.get(f"{url}/api/v1/summary").is_success  # 503 until its detector has started
        return judges and answer.is_success and [step["complete"] for step in answer.json()] == [True] * STEPS
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def rings(folder: pathlib.Path, *, transfers: bool = False) -> Iterator[None]:
    """Two ranks that have run a few steps of 10 ms and still live; with `transfers` rank 1 gets 1 MiB in each."""
    writers = [_ring(folder, rank) for rank in range(2)]
    start_ns = megatronapp_native.monotonic_ns()
    for step in range(STEPS):
        for writer in writers:
            begin = start_ns + step * 10_000_000
            nothing = (0, 0, NO_COMM)
            writer.record(begin, 4_000_000, step, *nothing, 0, int(RecordKind.FORWARD), 0, 0, 0)
            writer.record(begin + 4_000_000, 5_000_000, step, *nothing, 0, int(RecordKind.BACKWARD), 0, 0, 0)
            writer.record(begin, 10_000_000, step, *nothing, NO_MICROBATCH, int(RecordKind.STEP), 0, 0, 0)
        if transfers:
            message = (0, (1 << 20) // BYTES_UNIT, 0)
            copy = (int(RecordKind.COPY), 0, int(TransferPath.SHARED_MEMORY), int(Flag.AUX_BYTES))
            writers[1].record(begin, 2_000_000, step, *message, 0, *copy)
    try:
        yield
    finally:
        for writer in writers:
            writer.close(True)


def _ring(folder: pathlib.Path, rank: int) -> megatronapp_native.RingWriter:
    metadata = {
        "rank": rank,
        "localRank": rank,
        "worker": 0,
        "node": "node-0",
        "address": "127.0.0.2",
        "pid": os.getpid(),
        "world": 2,
        "layout": {"tensor": 1, "pipeline": 1, "virtualPipeline": 1, "data": 2, "context": 1, "expert": 1},
        "coordinates": {"tp": 0, "cp": 0, "ep": 0, "dp": rank, "pp": 0},
        "comms": [{"slot": 0, "kind": "p2p", "members": [0, 1]}],
        "device": "cpu",
        "totalIterations": 1000,
        "numMicrobatches": 1,
        "recordCostNs": None,
    }
    path = folder / f"ring.rank{rank}.ring"
    writer = megatronapp_native.RingWriter(str(path), 4096, 0, json.dumps(metadata).encode())
    writer.clock_pair()
    return writer
