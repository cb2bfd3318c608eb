"""`megatronapp` on a cluster: a real API server, a real gateway and hub; only what a kubelet would do is played."""

import argparse
import contextlib
import io
import json
import pathlib
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import gateway
import kube
import pytest
import yaml

from megatronapp_common import cli
from megatronapp_common.names import LABEL_ATTEMPT
from megatronapp_operator.cli.cluster import meant
from megatronapp_operator.cli.cluster.logs import select

Run = Callable[..., tuple[int, str, str]]
Capture = pytest.CaptureFixture[str]
LOG = "launcher: starts\n[rank 0] step 1\n[rank 1] loss 7.5\n[rank 10] other\n[rank 1] [odd] text\nlauncher: ends\n"


@pytest.fixture
def manifest(tmp_path: pathlib.Path) -> pathlib.Path:
    document = yaml.safe_load((kube.ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document | {"metadata": {"name": "demo"}}), encoding="utf-8")
    return path


def test_a_job_is_run_seen_and_deleted(
    plane: kube.ControlPlane, namespace: str, run: Run, manifest: pathlib.Path
) -> None:
    assert run("run", "--detach", str(manifest)) == (0, "megatronjob.megatronapp.io/demo created\n", "")
    assert run("run", "--detach", str(manifest))[1] == "megatronjob.megatronapp.io/demo unchanged\n"
    job = found(plane, namespace)
    progress = {"iteration": 5, "totalIterations": 9, "loss": 2.5}
    replicas = {"desired": 2, "running": 2}
    gateway.set_status(plane, job, phase="Running", progress=progress, replicaStatuses=replicas)
    code, table, _ = run("get")
    head, row = (line.split() for line in table.splitlines())
    assert head == ["NAME", "PHASE", "WORKERS", "RESTARTS", "ITERATION", "SLOW", "AGE"]
    assert (code, row[:6]) == (0, ["demo", "Running", "2/2", "0", "5/9", "<none>"])
    assert json.loads(run("get", "demo", "-o", "json")[1])["metadata"]["uid"] == job.uid
    assert run("get", "-A")[0] == 1  # no right beyond the namespace
    event(plane, job, "Trains.")
    _, text, _ = run("describe", "demo")
    assert f"Namespace:    {namespace}" in text
    assert "Trains." in text
    assert run("delete", "demo")[1] == 'megatronjob.megatronapp.io "demo" deleted\n'
    code, _, problem = run("describe", "demo")
    assert (code, problem) == (
        1,
        f"error: megatronjobs.megatronapp.io \"demo\" not found in namespace '{namespace}'; "
        "`megatronapp get -A --cluster` lists the jobs\n",
    )
    assert run("delete", "demo", "--ignore-not-found") == (0, "", "")
    assert run("wait", "demo", "--for", "delete")[0] == 0


def test_all_namespaces_are_a_column_more(plane: kube.ControlPlane, namespace: str) -> None:
    gateway.make_job(plane, namespace, "mine", hub=False)
    admin = str(plane.kubeconfig())
    command = [sys.executable, "-m", "megatronapp_common.cli", "get", "-A", "--kubeconfig", admin]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:3] for line in done.stdout.splitlines()]
    assert rows[0] == ["NAMESPACE", "NAME", "PHASE"]
    assert [namespace, "mine", "Pending"] in rows


def test_following_tells_what_happens_and_ends_with_the_job(
    plane: kube.ControlPlane, namespace: str, run: Run, config: pathlib.Path, manifest: pathlib.Path
) -> None:
    assert run("run", "--detach", str(manifest))[0] == 0
    job = found(plane, namespace)
    verdict = {"id": "v", "state": "confirmed", "sentence": "Rank 1 is slow."}
    gateway.set_status(plane, job, phase="Running", progress={"iteration": 5, "attempt": 0}, slowRanks=[verdict])
    event(plane, job, "Rank 1 is slow,\x1b]0;owned\x07 they say.", kind="Warning")

    class Output(io.StringIO):
        """Output after which the job fails, once it has been shown as running."""

        def write(self, text: str) -> int:
            if "demo: Running" in text:
                gateway.set_status(plane, job, phase="Failed")
            return super().write(text)

    with contextlib.redirect_stdout(Output()) as output:
        assert cli.main(["run", "--follow", str(manifest), "--kubeconfig", str(config)]) == 1
    assert output.getvalue().splitlines() == [
        "megatronjob.megatronapp.io/demo unchanged",
        "warning: Rank 1 is slow,\ufffd]0;owned\ufffd they say.",
        "step 5  loss <none>",
        ">> Rank 1 is slow.",
        "demo: Running",
        "demo: Failed",
    ]
    code, _, problem = run("run", str(manifest))
    assert code == 1
    assert "has ended (Failed)" in problem
    assert "megatronapp delete demo" in problem


def test_ctrl_c_ends_the_following_and_not_the_job(
    plane: kube.ControlPlane, namespace: str, config: pathlib.Path, manifest: pathlib.Path
) -> None:
    command = [sys.executable, "-m", "megatronapp_common.cli", "run", "--kubeconfig", str(config), str(manifest)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [
            "megatronjob.megatronapp.io/demo created\n",
            "demo: Pending\n",
        ]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "demo continues in the cluster" in rest
    assert found(plane, namespace).name == "demo"


def test_a_bad_manifest_and_another_namespace_are_refused(
    run: Run, manifest: pathlib.Path, config: pathlib.Path
) -> None:
    document = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    document["metadata"]["namespace"] = "elsewhere"
    manifest.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert "metadata.namespace is 'elsewhere'" in run("run", "-n", "here", str(manifest))[2]
    assert 'cannot get resource "megatronjobs"' in run("run", str(manifest))[2]
    manifest.write_text(yaml.safe_dump(document | {"spec": {"nodes": 0}}), encoding="utf-8")
    assert run("run", str(manifest))[0] == 2
    code, _, problem = run("get", "--context", "none")
    assert code == 1
    assert "name one by --kubeconfig FILE and --context NAME" in problem


def test_waiting_ends_when_it_is_so_or_cannot_be(plane: kube.ControlPlane, namespace: str, run: Run) -> None:
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    moment = {"lastTransitionTime": "2026-01-01T00:00:00Z", "reason": "Seen", "message": "It trains."}
    running = {"type": "Running", "status": "True", **moment}
    gateway.set_status(plane, job, phase="Running", conditions=[running])
    met = "megatronjob.megatronapp.io/demo condition met\n"
    assert run("wait", "demo", "--for", "condition=Running")[:2] == (0, met)
    gateway.set_status(plane, job, phase="Failed", conditions=[{**running, "type": "Failed"}])
    assert "Complete cannot become True" in run("wait", "demo", "--for", "condition=Complete")[2]


@pytest.mark.parametrize(
    ("rank", "lines"),
    [
        (0, ["step 1"]),
        (1, ["loss 7.5", "[odd] text"]),
        (10, ["other"]),
        (2, []),
        (None, ["launcher: starts", "launcher: ends"]),
    ],
)
def test_lines_are_told_apart_by_their_rank(rank: int | None, lines: list[str]) -> None:
    assert list(select(LOG.splitlines(), rank)) == lines


def test_logs_come_from_the_pod_of_the_ranks_worker(
    plane: kube.ControlPlane, namespace: str, run: Run, kubelet: str
) -> None:
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    code, _, problem = run("logs", "demo", "--rank", "1")
    assert code == 1
    assert f"pod {namespace}/demo-worker-0 does not exist" in problem
    gateway.make_pod(plane, job, "demo-worker-0", address=job.address, nodeName=kubelet)
    label = {"metadata": {"labels": {LABEL_ATTEMPT: "2"}}}
    gateway.patch(plane, f"/api/v1/namespaces/{namespace}/pods/demo-worker-0", label)
    assert run("logs", "demo", "--rank", "1")[:2] == (0, "loss 7.5\n[odd] text\n")
    assert run("logs", "demo", "--rank", "1", "--tail", "1")[1] == "[odd] text\n"
    assert run("logs", "demo", "--worker", "0", "--attempt", "2")[1] == "launcher: starts\nlauncher: ends\n"
    assert (
        "is of attempt 2; the log of attempt 1 was deleted with its pod"
        in run("logs", "demo", "--rank", "1", "--attempt", "1")[2]
    )
    assert "has no worker 9" in run("logs", "demo", "--worker", "9")[2]
    gateway.set_status(plane, job, phase="Succeeded")
    assert run("logs", "demo", "--rank", "0", "-f")[:2] == (0, "step 1\n")


def test_a_cluster_is_meant_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRONAPP_CONTEXT", raising=False)
    assert not meant(argparse.Namespace(context=None, namespace=None, kubeconfig=None, cluster=False))
    for name in ("context", "namespace", "kubeconfig", "cluster"):
        assert meant(argparse.Namespace(**{name: "x"}))
    monkeypatch.setenv("MEGATRONAPP_CONTEXT", "there")
    assert meant(argparse.Namespace())


def found(plane: kube.ControlPlane, namespace: str, name: str = "demo") -> gateway.GatewayJob:
    """The job that the command has stored."""
    with plane.client() as client:
        document = client.get(f"{gateway.JOBS}/{namespace}/megatronjobs/{name}").json()
    return gateway.GatewayJob(
        namespace=namespace, name=name, uid=document["metadata"]["uid"], document=document, address=""
    )


def event(plane: kube.ControlPlane, job: gateway.GatewayJob, note: str, *, kind: str = "Normal") -> None:
    """An Event as the operator writes it."""
    regarding = {"kind": "MegatronJob", "name": job.name, "namespace": job.namespace, "uid": job.uid}
    body: dict[str, Any] = {
        "metadata": {"name": f"{job.name}.{kind.lower()}"},
        "regarding": regarding,
        "reason": "Seen",
        "type": kind,
        "note": note,
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "megatron-operator",
        "reportingInstance": "one",
        "action": "Report",
    }
    gateway.create(plane, f"/apis/events.k8s.io/v1/namespaces/{job.namespace}/events", body)


class _Kubelet(BaseHTTPRequestHandler):
    """Handler of the one request of a kubelet that `logs` leads to; each line is of the second after the last."""

    def do_GET(self) -> None:
        request = urllib.parse.urlsplit(self.path)
        good = request.path.startswith("/containerLogs/") and "/trainer" in request.path
        query = urllib.parse.parse_qs(request.query)
        times = [f"2026-01-01T00:00:{second:02}" for second in range(len(LOG.splitlines()))]
        since = query.get("sinceTime", [""])[0].removesuffix("Z")
        lines = [(time, line) for time, line in zip(times, LOG.splitlines(), strict=True) if time >= since]
        rows = [f"{time}.5Z {line}\n" if "timestamps" in query else f"{line}\n" for time, line in lines]
        self.send_response(200 if good else 404)
        self.end_headers()
        self.wfile.write("".join(rows).encode() if good else b"")

    def log_message(self, format: str, *_: object) -> None:
        """Write no log lines."""


@pytest.fixture
def kubelet(plane: kube.ControlPlane, namespace: str) -> Iterator[str]:
    """Start a node whose kubelet knows one log; its certificate is the API server's own, which is not checked here."""
    name = f"node-{namespace}"
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Kubelet)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificates = plane.folder / "certificates"
    context.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    gateway.create(plane, "/api/v1/nodes", {"metadata": {"name": name}})
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": server.server_port}},
    }
    gateway.patch(plane, f"/api/v1/nodes/{name}/status", {"status": status})
    try:
        yield name
    finally:
        with contextlib.suppress(socket.error):
            server.shutdown()
        server.server_close()
        thread.join()
