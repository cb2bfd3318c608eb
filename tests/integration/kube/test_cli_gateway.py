"""`megatronapp ui`, `inject` and `trace export` on a cluster: the way to a real gateway, and what opens it."""

import argparse
import base64
import contextlib
import dataclasses
import http.server
import json
import pathlib
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import gateway
import httpx
import kube
import pytest
import yaml
from operator_simulation import SETTINGS
from perfetto_rule import read_perfetto

from megatronapp_common import cli
from megatronapp_common.shared_documents import DocumentReader, DocumentWriter
from megatronapp_common.web.tokens import TokenRole, job_secret
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner
from megatronapp_operator.cli.cluster import gateway_client, tokens, trace
from megatronapp_operator.cli.cluster.connection import ClusterJob, opened
from megatronapp_operator.cli.cluster.gateway_client import GatewayEndpoint
from megatronapp_operator.errors import HubError
from megatronapp_operator.keys import key_id

ALL = gateway.on_jobs("get", "list", "create", "update", "patch", "delete")
Run = Callable[..., tuple[int, str, str]]
Capture = pytest.CaptureFixture[str]


def test_faults_and_traces_go_through_the_gateway_with_the_callers_own_token(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, run: Run, tmp_path: pathlib.Path
) -> None:
    job = gateway.make_job(plane, namespace, "demo")
    job.document["spec"] |= {"scope": {"training": {"startPaused": True}}}
    out = tmp_path / "trace.json"
    fault = ["demo", "--rank", "1", "--kind", "compute", "--factor", "2", "--from-step", "90", "--steps", "3"]
    export = ("trace", "export", "demo", "-o", str(out), "--gateway", reviewing.url)
    with gateway.hub(job, tmp_path / "hub", port=reviewing.hub_port, key=reviewing.key):
        code, text, problem = run("inject", "--gateway", reviewing.url, *fault)
        assert (code, problem) == (0, "")
        assert text.endswith("rank 1, compute x 2, steps 90 to 92\n")
        with reviewing.client(reviewing.job_token(job.uid)) as client:
            gateway.wait_for(lambda: client.get(f"{job.path}/faults").is_success)
            assert [fault["rank"] for fault in client.get(f"{job.path}/faults").json()][-1] == 1
        _pause(tmp_path / "hub", reviewing, job, run)
        code, text, _ = run(*export, "--from", "2", "--to", "4")
        assert (code, text) == (
            0,
            f"{out}: 18 spans, 0 arrows, from the running hub; open it at https://ui.perfetto.dev\n",
        )
        document = json.loads(out.read_text(encoding="utf-8"))
        assert {event["args"]["step"] for event in document["traceEvents"] if event["ph"] == "X"} == {2, 3, 4}
        code, text, _ = run(*export, "--from", "2", "--format", "perfetto")
        assert (code, text) == (0, f"{out}: 0.00 MB, from the running hub; open it at https://ui.perfetto.dev\n")
        assert {values["step"] for values in read_perfetto(out.read_bytes()).arguments} >= {2, 3, 4}
        code, _, problem = run(*export, "--from", "900")
        assert (code, problem) == (1, "error: no step of that range is stored\n")
        assert "cannot write the trace" in run(*export[:4], str(tmp_path / "none" / "t"), *export[5:])[2]
    assert "outside of this world" in run("inject", "--gateway", reviewing.url, *fault[:2], "99", *fault[3:])[2]
    assert "--to is before --from" in run(*export, "--from", "4", "--to", "2")[2]
    assert 'megatronjobs.megatronapp.io "none" not found' in run("trace", "export", "none", *export[3:])[2]


def _pause(folder: pathlib.Path, at: gateway.Gateway, job: gateway.GatewayJob, run: Run) -> None:
    """Pause the training of a job through the gateway, up to the page that rank 0 reads; a viewer may not."""
    control = {"state": "running", "stepsLeft": 0, "pausedSince": None, "pausedSeconds": 0.0, "saves": False}
    progress = DocumentWriter(folder / "ring.progress")
    progress.write({"attempt": 0, "iteration": 7, "state": "training", "control": control | {"orders": []}})
    with at.client(at.job_token(job.uid)) as client:
        gateway.wait_for(lambda: client.get(f"{job.path}/training").json().get("state") == "running")
        refused = client.post(f"{job.path}/training/lease", json={"action": "take"})
        assert (refused.status_code, refused.json()["code"]) == (403, "needs-controller")
    where = ("--gateway", at.url)
    assert "pause it first" in run("training", "demo", "step", "2", *where)[2]
    assert run("training", "demo", "pause", "--no-wait", *where)[:2] == (
        0,
        "pause: ordered; the ranks obey at the end of the step that runs\n",
    )
    page = DocumentReader(folder / "ring.control")
    orders = [{"number": 1, "kind": "pause"}]
    gateway.wait_for(lambda: (page.read() or {}).get("training", {}).get("orders") == orders)
    assert run("training", "demo", "status", *where)[1].startswith("State:    pausing\n")
    page.close()
    progress.close()


@pytest.mark.full("a second command; faults and traces go the same way")
def test_transfers_of_a_job_are_shown_through_the_gateway(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, run: Run, tmp_path: pathlib.Path
) -> None:
    job = gateway.make_job(plane, namespace, "demo")
    bench = ("transport", "bench", "--gateway", reviewing.url, "--job")
    with gateway.hub(job, tmp_path / "hub", port=reviewing.hub_port, key=reviewing.key, transfers=True):
        code, text, problem = run(*bench, "demo")
        assert (code, problem) == (0, "")
        assert text.splitlines()[1].split() == ["0", "1", "shared-memory", "1", "1024.0", "2.000", "0.52"]
        assert json.loads(run(*bench, "demo", "--json")[1])["pairs"][0]["bytes"] % (1 << 20) == 0
    assert 'megatronjobs.megatronapp.io "none" not found' in run(*bench, "none")[2]
    assert "--rounds is for ranks" in run(*bench, "demo", "--rounds", "5")[2]


def test_the_pages_open_by_an_address_that_holds_no_token(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, run: Run, token: str
) -> None:
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    code, text, _ = run("ui", "demo", "--gateway", reviewing.url, "--print")
    assert code == 0
    assert token not in text
    address = urllib.parse.urlsplit(text.strip())
    assert urllib.parse.parse_qs(address.query)["job"] == [f"{namespace}/demo"]
    assert f"http://{address.netloc}" == reviewing.url  # who forwards that port, and from where, is not known
    assert set(urllib.parse.parse_qs(address.query)) == {"job"}
    (ticket,) = urllib.parse.parse_qs(address.fragment)["code"]
    with reviewing.client() as browser:
        assert browser.post("/login", data={"token": ticket}).status_code == 303
        assert browser.get(job.path).json()["uid"] == job.uid
    serving = yaml.safe_load((kube.ROOT / "examples" / "serve-cluster.yaml").read_text(encoding="utf-8"))
    gateway.create(plane, f"{gateway.JOBS}/{namespace}/megatronjobs", {**serving, "metadata": {"name": "serving"}})
    address = urllib.parse.urlsplit(run("ui", "serving", "--gateway", reviewing.url, "--print")[1])
    assert urllib.parse.parse_qs(address.query) == {"job": [f"{namespace}/serving"], "page": ["scope"]}


def test_who_has_no_token_opens_a_job_by_its_secret(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, tmp_path: pathlib.Path, token: str
) -> None:
    """A kubeconfig with a token that the gateway refuses, whose owner may read the job's Secret."""
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    pinned = {"attempt": 0, "trainerImage": "t", "analyzerImage": "a", "keyId": key_id(reviewing.key)}
    gateway.set_status(plane, job, phase="Starting", pinned=pinned)
    make_secret(plane, job, reviewing.key)
    reader = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    poor = gateway.account(plane, namespace, "poor", grants=[reader])
    config = gateway.kubeconfig(plane, tmp_path, poor, namespace=namespace)
    with reviewing.client(poor) as client:
        assert client.get(job.path).status_code == 403
    document = job.document | {"status": {"pinned": pinned}}
    with opened(asked(config)) as cluster:
        found = tokens.token_for(cluster, GatewayEndpoint(reviewing.url), ClusterJob(document))
        assert found == reviewing.job_token(job.uid, TokenRole.CONTROLLER)
        viewer = reviewing.job_token(job.uid)
        with gateway_before_megascope(viewer) as url:
            assert tokens.token_for(cluster, GatewayEndpoint(url), ClusterJob(document)) == viewer


def test_a_job_opens_by_its_secret_before_its_first_attempt(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, tmp_path: pathlib.Path
) -> None:
    """While initializers run, the status does not have the id of the key yet, and the name of the Secret does."""
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    other = gateway.make_job(plane, namespace, "other", hub=False)
    for one in (job, other):
        make_secret(plane, one, reviewing.key)
    reader = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "list"]}
    poor = gateway.account(plane, namespace, "poor", grants=[reader])
    with opened(asked(gateway.kubeconfig(plane, tmp_path, poor, namespace=namespace))) as cluster:
        found = tokens.token_for(cluster, GatewayEndpoint(reviewing.url), ClusterJob(job.document))
        assert found == reviewing.job_token(job.uid, TokenRole.CONTROLLER)


def make_secret(plane: kube.ControlPlane, job: gateway.GatewayJob, key: str) -> None:
    """The Secret of a job, as the operator makes it."""
    owner = JobOwner(namespace=job.namespace, name=job.name, uid=job.uid)
    settings = dataclasses.replace(SETTINGS, key_id=key_id(key))
    resource, secret = render.secret(owner, job_secret(key, job.uid), settings)
    gateway.create(plane, resource.path(job.namespace), secret)


@contextlib.contextmanager
def gateway_before_megascope(taken: str) -> Iterator[str]:
    """The address of a gateway that takes one token alone."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.headers["Authorization"] == f"Bearer {taken}"
            body = b"{}" if good else json.dumps({"code": "log-in", "message": "unknown", "hint": ""}).encode()
            self.send_response(200 if good else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Write no log lines."""

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def asked(config: pathlib.Path, service_account: str | None = None) -> argparse.Namespace:
    """A command line with this kubeconfig."""
    return argparse.Namespace(
        kubeconfig=str(config), context=None, namespace=None, gateway=None, service_account=service_account
    )


@pytest.fixture
def jane(plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the kubeconfig of a user with a certificate and no token, who may see jobs here."""
    user = f"jane-{namespace}"
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    gateway.create(plane, f"{rbac}/roles", {"metadata": {"name": user}, "rules": [ALL]})
    bind_person(plane, namespace, user, user)
    return gateway.certified(plane, tmp_path, user, namespace=namespace)


def bind_person(plane: kube.ControlPlane, namespace: str, user: str, role: str) -> None:
    group = "rbac.authorization.k8s.io"
    body = {
        "metadata": {"name": f"{user}-{role}"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": role},
        "subjects": [{"kind": "User", "name": user, "apiGroup": group}],
    }
    gateway.create(plane, f"/apis/{group}/v1/namespaces/{namespace}/rolebindings", body)


def test_who_shows_a_certificate_is_told_what_to_do(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, jane: pathlib.Path, capsys: Capture
) -> None:
    gateway.make_job(plane, namespace, "demo", hub=False)
    for words in ([], ["demo"]):
        assert cli.main(["ui", *words, "--kubeconfig", str(jane), "--gateway", reviewing.url, "--print"]) == 1
        problem = capsys.readouterr().err
        assert "your kubeconfig has no token (most likely a client certificate)" in problem
        assert "--service-account NAMESPACE/NAME" in problem
    words = ["--gateway", reviewing.url, "--print", "--service-account"]
    assert cli.main(["ui", "--kubeconfig", str(jane), *words, f"{namespace}/none"]) == 1
    assert 'cannot create resource "serviceaccounts/token"' in capsys.readouterr().err
    assert cli.main(["ui", "--kubeconfig", str(jane), *words, "a/b/c"]) == 1
    assert "write NAME or NAMESPACE/NAME of a service account" in capsys.readouterr().err


def test_who_shows_a_certificate_enters_by_a_short_lived_token_for_the_gateway_alone(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, jane: pathlib.Path, capsys: Capture
) -> None:
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    gateway.account(plane, namespace, "megatronapp-viewer", grants=[gateway.on_jobs("get", "list")])
    rule = {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]}
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    gateway.create(plane, f"{rbac}/roles", {"metadata": {"name": "tokens"}, "rules": [rule]})
    bind_person(plane, namespace, f"jane-{namespace}", "tokens")
    service = {"metadata": {"namespace": namespace, "name": "megatronapp"}}
    with opened(asked(jane)) as cluster:
        found = tokens.token_for(cluster, GatewayEndpoint(reviewing.url, service=service), None)
    told = capsys.readouterr().err
    assert told == f"note: with the rights of service account {namespace}/megatronapp-viewer\n"
    claims = json.loads(base64.urlsafe_b64decode(found.split(".")[1] + "=="))
    assert claims["aud"] == ["megatronapp.io/gateway"]
    assert claims["exp"] - claims["iat"] == 8 * 3600
    with reviewing.client(found) as client:
        assert client.get(job.path).status_code == 200
        assert client.post(f"{job.path}/faults", json={}).status_code == 403
    headers = {"Authorization": f"Bearer {found}"}
    with httpx.Client(headers=headers, verify=plane.context(), trust_env=False, timeout=120) as client:
        assert client.get(f"{plane.url}/api").status_code == 401
    with opened(asked(jane, service_account="megatronapp-viewer")) as cluster:
        assert tokens.token_for(cluster, GatewayEndpoint(reviewing.url), ClusterJob(job.document))


def test_a_token_for_somebody_else_opens_nothing(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    gateway.account(plane, namespace, "user", grants=[gateway.on_jobs("get", "list")])
    for audiences in (["vault"], ["vault", "megatronapp.io/gateways"]):
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/user/token"
        token = gateway.create(plane, path, {"spec": {"audiences": audiences}})["status"]["token"]
        with reviewing.client(token) as client:
            assert client.get("/api/v1/jobs").status_code == 401


def test_a_plugin_of_the_kubeconfig_gives_the_token(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, tmp_path: pathlib.Path, token: str
) -> None:
    config = gateway.kubeconfig(plane, tmp_path, "none", namespace=namespace)
    document = yaml.safe_load(config.read_text(encoding="utf-8"))
    version = "client.authentication.k8s.io/v1"
    answer = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": token}}
    plugin = {"apiVersion": version, "command": "echo", "args": [json.dumps(answer)], "interactiveMode": "Never"}
    document["users"][0]["user"] = {"exec": plugin}
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    with opened(asked(config)) as cluster:
        assert tokens.token_for(cluster, GatewayEndpoint(reviewing.url), ClusterJob(job.document)) == token


def test_a_trace_of_a_job_without_a_hub_is_explained(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, run: Run, tmp_path: pathlib.Path
) -> None:
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    words = ("trace", "export", "demo", "-o", str(tmp_path / "trace.json"), "--gateway", reviewing.url)
    assert "has no hub now; it needs spec.analyzer.enabled: true" in run(*words)[2]
    gateway.set_status(plane, job, phase="Succeeded")
    assert "demo has ended, and its traces were deleted with its hub" in run(*words)[2]
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"traceEvents": 7}', b'{"traceEvents": [7]}', b"[" * 100_000])
def test_what_is_no_trace_is_not_written(content: bytes) -> None:
    with pytest.raises(HubError, match="did not answer with a trace"):
        trace.summary(content, "perfetto")


def test_ends_of_arrows_are_no_spans() -> None:
    events = [{"ph": "X", "cat": "span"}, {"ph": "s"}, {"ph": "X", "cat": "arrow"}, {"ph": "f"}]
    assert trace.summary(json.dumps({"traceEvents": events}).encode(), "chrome") == "1 spans, 1 arrows"


def test_a_gateway_that_cannot_be_reached_is_told_with_what_to_write(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path, capsys: Capture
) -> None:
    services = {"apiGroups": [""], "resources": ["services"], "verbs": ["get", "list"]}
    token = gateway.account(plane, namespace, "user", grants=[ALL, services])
    config = gateway.kubeconfig(plane, tmp_path, token, namespace=namespace)
    gateway.make_job(plane, namespace, "demo", hub=False)

    def problem(*words: str) -> str:
        assert cli.main(["ui", "demo", "--kubeconfig", str(config), "--print", *words]) == 1
        return capsys.readouterr().err

    forget = "meta.helm.sh/release-namespace-"  # a test of the chart may have left it
    assert plane.kubectl("annotate", "crd", "megatronjobs.megatronapp.io", forget).returncode == 0
    how = "name it by --gateway NAMESPACE/SERVICE, or by --gateway URL if an Ingress leads to it"
    assert how in problem("--gateway", f"{namespace}/none")
    assert "write NAMESPACE/SERVICE" in problem("--gateway", "none")
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "megatronapp"}
    body = {"metadata": {"name": "megatronapp", "labels": labels}, "spec": {"ports": [{"port": 8080}]}}
    gateway.create(plane, f"/api/v1/namespaces/{namespace}/services", body)  # of any user, with labels that all know
    assert "which names the gateway's namespace; request the rights" in problem()
    _let_read_definitions(plane, namespace)
    assert "has no annotation meta.helm.sh/release-namespace" in problem()
    release = f"{namespace}-release"
    gateway.create(plane, "/api/v1/namespaces", {"metadata": {"name": release}})
    with _released_in(plane, release):
        assert f"you may not list the Services of '{release}'" in problem()
        assert "`gateway.users` of the chart" in problem()
        gateway.create(plane, f"/api/v1/namespaces/{release}/services", body)
        one = {**services, "verbs": ["get"], "resourceNames": ["megatronapp"]}
        rights = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{release}"
        gateway.create(plane, f"{rights}/roles", {"metadata": {"name": "one"}, "rules": [one]})
        gateway.create(plane, f"{rights}/rolebindings", _bound("one", namespace))
        assert "the port of the gateway cannot be forwarded" in problem()  # found by its name
        with plane.client() as client:
            assert client.delete(f"/api/v1/namespaces/{release}/services/megatronapp").is_success
        listing = {"metadata": {"name": "services"}, "rules": [services]}
        rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{release}"
        gateway.create(plane, f"{rbac}/roles", listing)
        gateway.create(plane, f"{rbac}/rolebindings", _bound("services", namespace))
        assert f"'{release}', the release's namespace, has no gateway; {how}" in problem()
        gateway.create(plane, f"/api/v1/namespaces/{release}/services", body)
        assert (
            f"the port of the gateway cannot be forwarded: Service {release}/megatronapp selects no pods" in problem()
        )


def _bound(role: str, namespace: str) -> dict[str, Any]:
    """A binding of the user to a role of another namespace."""
    subjects = [{"kind": "ServiceAccount", "name": "user", "namespace": namespace}]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role}
    return {"metadata": {"name": role}, "roleRef": reference, "subjects": subjects}


def _let_read_definitions(plane: kube.ControlPlane, namespace: str) -> None:
    rule = {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": ["get"]}
    role = f"{namespace}-definitions"
    body = {"metadata": {"name": role}, "rules": [rule]}
    gateway.create(plane, "/apis/rbac.authorization.k8s.io/v1/clusterroles", body)
    gateway.bind(plane, namespace, "user", {"kind": "ClusterRole", "name": role}, everywhere=True)


@contextlib.contextmanager
def _released_in(plane: kube.ControlPlane, namespace: str) -> Iterator[None]:
    """Write what helm writes on the definition."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/megatronjobs.megatronapp.io"
    name = "meta.helm.sh/release-namespace"
    gateway.patch(plane, path, {"metadata": {"annotations": {name: namespace}}})
    try:
        yield
    finally:
        gateway.patch(plane, path, {"metadata": {"annotations": {name: None}}})


@pytest.mark.parametrize(
    ("url", "warned"),
    [("http://gateway.example/", True), ("https://gateway.example", False), ("http://127.0.0.1:1", False)],
)
def test_a_token_that_travels_in_plain_text_is_warned_of(
    config: pathlib.Path, capsys: Capture, url: str, warned: bool
) -> None:
    arguments = asked(config)
    arguments.gateway = url
    with opened(arguments) as cluster, gateway_client.open_gateway(cluster) as found:
        assert found.page == url.rstrip("/")
    assert ("can read your token" in capsys.readouterr().err) is warned
