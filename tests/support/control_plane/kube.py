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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import yaml
from ports import reserved_ports

from megatronapp_common.processes import terminate

ROOT = pathlib.Path(__file__).parents[3]
START_S = 240
STOP_S = 20
POLL_S = 0.05
EFFECT_S = 120
"""Time for the API server to act by what it has stored: it judges by copies of roles, policies and definitions."""
EFFECT_POLL_S = 0.01
ADMIN = "admin"
JOBS = "/apis/megatronapp.io/v1alpha1/megatronjobs"
MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}
RBAC = "/apis/rbac.authorization.k8s.io/v1"
DISCOVERY = {
    "Accept": "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,"
    "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
}
"""Header of a request for the resources of all groups."""
Object = dict[str, Any]
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
        self.create("/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def create(self, path: str, body: Object) -> Object:
        """POST as the administrator; the answer. Rights that a binding gives are in effect then."""
        with self.client() as client:
            answer = client.post(path, json=body)
            assert answer.is_success, answer.text
            document: Object = answer.json()
            _await_grants(client, _grants(client, [document]))
        return document

    @contextlib.contextmanager
    def given(self, documents: Sequence[Object]) -> Iterator[None]:
        """Apply roles, bindings and accounts, and delete them at the end; the API server acts by each at once."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        grants: list[Grant] = []
        with self.client() as client:
            try:
                done = self.kubectl("apply", "-f", "-", stdin=listed)
                assert done.returncode == 0, done.stderr
                grants = _grants(client, documents)
                _await_grants(client, grants)
                yield
            finally:
                done = self.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=listed)
                assert done.returncode == 0, done.stderr
                wait_until(lambda: all(grant.has_ended(client) for grant in grants), f"the end of {grants}")

    @contextlib.contextmanager
    def in_force(self, policy: pathlib.Path, name: str, probe: Callable[[], httpx.Response]) -> Iterator[None]:
        """Apply a file with an admission policy and its binding, and delete them at the end.

        `probe` sends a dry run that this policy alone refuses. The API server renews its copy of the policies once per
        second: a policy that has been deleted would still refuse what the next tests send.
        """
        wait_until(lambda: probe().is_success, f"an answer without {name}")
        try:
            done = self.kubectl("apply", "--server-side", "-f", str(policy))
            assert done.returncode == 0, done.stderr
            wait_until(lambda: name in (answer := probe()).text and answer.is_client_error, f"{name} to be in force")
            yield
        finally:
            done = self.kubectl("delete", "--ignore-not-found", "-f", str(policy))
            assert done.returncode == 0, done.stderr
            wait_until(lambda: probe().is_success, f"the end of {name}")

    def restrict(self, namespace: str) -> None:
        """Have the API server refuse pods in a namespace that break the restricted standard."""
        done = self.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
        assert done.returncode == 0, done.stderr
        self._until_pod(namespace, {}, httpx.codes.FORBIDDEN)

    def create_priority_class(self, name: str, value: int, namespace: str) -> None:
        """Create a PriorityClass, which pods of the namespace may name then."""
        self.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": name}, "value": value})
        self._until_pod(namespace, {"priorityClassName": name}, httpx.codes.CREATED)

    def _until_pod(self, namespace: str, spec: Object, status: int) -> None:
        """Wait until the API server answers a dry run of a pod so."""
        pod = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "main", "image": "none"}], **spec}}
        with self.client() as client:
            self._until_dry_run(client, f"/api/v1/namespaces/{namespace}/pods", pod, status)

    def _until_dry_run(self, client: httpx.Client, path: str, body: Object, status: int) -> None:
        wait_until(
            lambda: client.post(path, params={"dryRun": "All"}, json=body).status_code == status,
            f"{status} for {path} {body}",
        )

    def set_quota(self, namespace: str, hard: Mapping[str, str]) -> None:
        """Limit a namespace as the quota controller does, of which nothing is counted yet; it is in force then.

        The same quota permits no Lease: a dry run of such shows that the API server's copy of the quota has its status.
        """
        hard = {**hard, "count/leases.coordination.k8s.io": "0"}
        quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
        quota = self.create(quotas, {"metadata": {"name": "quota"}, "spec": {"hard": hard}})
        status = {"hard": hard, "used": dict.fromkeys(hard, "0")}
        with self.client() as client:
            client.put(f"{quotas}/quota/status", json=quota | {"status": status}).raise_for_status()
            self._until_dry_run(client, *_lease(namespace), httpx.codes.FORBIDDEN)

    def remove_quota(self, namespace: str) -> None:
        """Remove what `set_quota` has made; it is no longer in force then."""
        with self.client() as client:
            client.delete(f"/api/v1/namespaces/{namespace}/resourcequotas/quota").raise_for_status()
            self._until_dry_run(client, *_lease(namespace), httpx.codes.CREATED)

    def define(self, *paths: pathlib.Path) -> None:
        """Apply files of CustomResourceDefinitions, and wait until clients find their kinds and list their objects."""
        definitions: list[Object] = []
        for path in paths:
            done = self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path), "-o", "json")
            assert done.returncode == 0, done.stderr
            made = json.loads(done.stdout)
            definitions += made["items"] if made["kind"] == "List" else [made]
        with self.client() as client:
            wait_until(lambda: all(_is_served(client, each) for each in definitions), f"the kinds of {paths}")

    def delete_jobs(self) -> None:
        """Delete the jobs of all namespaces, which an operator that watches the whole cluster would manage."""
        with self.client() as client:
            for job in client.get(JOBS).raise_for_status().json()["items"]:
                path = "{apiVersion}/namespaces/{namespace}/megatronjobs/{name}".format(**job, **job["metadata"])
                if job["metadata"].get("finalizers"):
                    bare = {"metadata": {"finalizers": None}}
                    client.patch(f"/apis/{path}", json=bare, headers=MERGE_PATCH).raise_for_status()
                if "deletionTimestamp" not in job["metadata"]:
                    client.delete(f"/apis/{path}").raise_for_status()
            assert not client.get(JOBS).raise_for_status().json()["items"]

    def kubectl(self, *arguments: str, stdin: Any = None, user: str = ADMIN) -> "subprocess.CompletedProcess[str]":
        """Run kubectl; `stdin` is an object that it reads as JSON from `-f -`."""
        command = [str(self.programs / "kubectl"), "--kubeconfig", str(self.kubeconfig(user)), *arguments]
        text = None if stdin is None else json.dumps(stdin)
        environment = {"HOME": str(self.folder), "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment)


def wait_until(probe: Callable[[], bool], what: str) -> None:
    """Ask the API server until `probe` is true."""
    deadline = time.monotonic() + EFFECT_S
    while not probe():
        assert time.monotonic() < deadline, f"waited {EFFECT_S} s for {what} in vain"
        time.sleep(EFFECT_POLL_S)


def _await_grants(client: httpx.Client, grants: Sequence["Grant"]) -> None:
    wait_until(lambda: all(grant.holds(client) for grant in grants), str(grants))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Rules that a binding gives to a subject."""

    subject: Mapping[str, str]
    """Headers that make a request its own."""
    namespace: str
    rules: list[Object]

    def holds(self, client: httpx.Client) -> bool:
        """Return whether the API server permits all of it."""
        found = self._effective(client)
        return found is not None and all(rule in found for rule in self.rules)

    def has_ended(self, client: httpx.Client) -> bool:
        """Return whether the API server permits none of it."""
        found = self._effective(client)
        return found is not None and not any(rule in found for rule in self.rules)

    def _effective(self, client: httpx.Client) -> list[Object] | None:
        """The rules by which the API server judges the subject now; none if it is too busy to say."""
        question = {"spec": {"namespace": self.namespace}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        answer = client.post(path, json=question, headers=self.subject)
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            return None
        assert answer.is_success, answer.text
        return [_plain(rule) for rule in answer.json()["status"]["resourceRules"]]


def _plain(rule: Object) -> Object:
    return {key: rule.get(key) or [] for key in ("apiGroups", "resources", "verbs", "resourceNames")}


def _grants(client: httpx.Client, documents: Sequence[Object]) -> list[Grant]:
    """Return the grants of the bindings among some objects, by the roles that are stored."""
    return [
        Grant(subject=_impersonation(subject), namespace=namespace, rules=_rules(client, binding))
        for binding in documents
        if binding["kind"] in {"RoleBinding", "ClusterRoleBinding"}
        for namespace in [binding["metadata"].get("namespace", "default")]
        for subject in binding["subjects"]
    ]


def _rules(client: httpx.Client, binding: Object) -> list[Object]:
    role = binding["roleRef"]
    place = f"namespaces/{binding['metadata']['namespace']}/roles" if role["kind"] == "Role" else "clusterroles"
    answer = client.get(f"{RBAC}/{place}/{role['name']}")
    assert answer.is_success, f"a role is created before its bindings: {answer.text}"
    return [_plain(rule) for rule in answer.json()["rules"] or () if rule.get("resources")]


def _impersonation(subject: Object) -> Mapping[str, str]:
    if subject["kind"] == "ServiceAccount":
        return {"Impersonate-User": f"system:serviceaccount:{subject['namespace']}:{subject['name']}"}
    if subject["kind"] == "Group":
        return {"Impersonate-User": "member", "Impersonate-Group": subject["name"]}
    return {"Impersonate-User": subject["name"]}


def _lease(namespace: str) -> tuple[str, Object]:
    """Path and body of a Lease that nothing uses."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases", {"metadata": {"name": "probe"}}


def _is_served(client: httpx.Client, definition: Object) -> bool:
    group, plural = definition["spec"]["group"], definition["spec"]["names"]["plural"]
    for version in [version["name"] for version in definition["spec"]["versions"] if version["served"]]:
        found = client.get(f"/apis/{group}/{version}")
        if not found.is_success or plural not in {each["name"] for each in found.json()["resources"]}:
            return False
        if f'"{plural}"' not in client.get("/apis", headers=DISCOVERY).text:  # kubectl asks for all groups at once
            return False
        if not client.get(f"/apis/{group}/{version}/{plural}").is_success:
            return False
    return True


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


@contextlib.contextmanager
def controller(plane: ControlPlane, name: str) -> Iterator[None]:
    """Run a controller of Kubernetes, as "disruption-controller", alone until the block ends."""
    command = [
        str(programs("cluster") / "kube-controller-manager"),
        f"--kubeconfig={plane.kubeconfig()}",
        f"--controllers={name}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
    with _program(plane.folder, command) as process:
        yield
        if process.poll() is not None:
            raise KubeError(f"{name} ended with code {process.returncode}:\n{_log(plane.folder, process)}")


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
