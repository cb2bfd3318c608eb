"""Connection of the subcommands to a real API server by what a kubeconfig contains: addresses, TLS, credentials."""

import argparse
import contextlib
import http.server
import json
import pathlib
import select
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gateway
import kube
import pytest
import yaml
from ports import reserved_ports

from megatronapp_common import cli
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError, UnavailableError
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.errors import OperatorError

VERSION = "client.authentication.k8s.io/v1"
EXPIRED = "2020-01-01T00:00:00Z"


class Kubeconfig:
    """A kubeconfig that a test changes."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.user: dict[str, Any] = self.document["users"][0]["user"]
        self.cluster: dict[str, Any] = self.document["clusters"][0]["cluster"]

    def arguments(self) -> argparse.Namespace:
        """Write the file; return a command line that selects it."""
        self.path.write_text(yaml.safe_dump(self.document), encoding="utf-8")
        return argparse.Namespace(kubeconfig=str(self.path), context=None, namespace=None)

    def names(self) -> list[str]:
        """Return the names of the jobs that this kubeconfig leads to."""
        with opened(self.arguments()) as cluster:
            return [job.name for job in cluster.views()]

    def run_plugin(self, status: dict[str, Any] | None, *, code: int = 0) -> pathlib.Path:
        """Have the credentials printed by a program, which counts its calls in the file that is returned."""
        answer = {"apiVersion": VERSION, "kind": "ExecCredential", "status": status}
        calls, program = self.path.with_name("calls"), self.path.with_name("plugin.py")
        program.write_text(
            f"import os, sys\nopen({str(calls)!r}, 'a').write(os.environ['REGION'] + sys.argv[1] + '\\n')\n"
            f"print({json.dumps(answer)!r})\nprint('log in first', file=sys.stderr)\nsys.exit({code})\n",
            encoding="utf-8",
        )
        self.user.clear()
        self.user["exec"] = {
            "apiVersion": VERSION,
            "interactiveMode": "Never",
            "command": sys.executable,
            "args": [str(program), "--a"],
            "env": [{"name": "REGION", "value": "here"}],
        }
        return calls


@pytest.fixture
def kubeconfig(plane: kube.ControlPlane, namespace: str, config: pathlib.Path) -> Kubeconfig:
    gateway.make_job(plane, namespace, "demo", hub=False)
    return Kubeconfig(config)


def test_a_plugin_gives_a_token(kubeconfig: Kubeconfig) -> None:
    calls = kubeconfig.run_plugin({"token": kubeconfig.user["token"]})
    assert kubeconfig.names() == ["demo"]
    assert calls.read_text() == "here--a\n"


def test_a_plugins_token_is_renewed_when_it_has_expired(kubeconfig: Kubeconfig) -> None:
    calls = kubeconfig.run_plugin({"token": kubeconfig.user["token"], "expirationTimestamp": EXPIRED})
    with opened(kubeconfig.arguments()) as cluster:
        at_login = calls.read_text()
        assert cluster.views()
        assert calls.read_text() == at_login + at_login


def test_a_plugin_that_fails_later_is_reported(kubeconfig: Kubeconfig) -> None:
    kubeconfig.run_plugin({"token": kubeconfig.user["token"], "expirationTimestamp": EXPIRED})
    with opened(kubeconfig.arguments()) as cluster:
        kubeconfig.run_plugin(None, code=3)
        with pytest.raises(OperatorError, match=r"credential plugin failed: exec: process returned 3\. log in first$"):
            cluster.views()


def test_simultaneous_connections_run_the_plugin_once(kubeconfig: Kubeconfig) -> None:
    token = kubeconfig.user["token"]
    calls = kubeconfig.run_plugin({"token": token, "expirationTimestamp": EXPIRED})
    with opened(kubeconfig.arguments()) as cluster, ThreadPoolExecutor(6) as pool:
        kubeconfig.run_plugin({"token": token, "expirationTimestamp": "2999-01-01T00:00:00Z"})
        together = threading.Barrier(6)

        def bearer(_: int) -> str | None:
            together.wait()
            return cluster.bearer()

        assert list(pool.map(bearer, range(6))) == [token] * 6
    assert len(calls.read_text().splitlines()) == 2  # at login, and this


def test_an_auth_provider_that_the_package_cannot_read_is_reported(kubeconfig: Kubeconfig) -> None:
    kubeconfig.user.clear()
    kubeconfig.user["auth-provider"] = {"name": "gcp", "config": {}}
    problem = r"^no cluster: the credentials of the kubeconfig cannot be read \(.*; if its user has an auth-provider"
    with pytest.raises(OperatorError, match=problem):
        opened(kubeconfig.arguments()).__enter__()


def test_a_plugin_gives_a_client_certificate(
    plane: kube.ControlPlane, namespace: str, kubeconfig: Kubeconfig, tmp_path: pathlib.Path
) -> None:
    shown = Kubeconfig(gateway.certified(plane, tmp_path, "ada", namespace=namespace))
    pair = [pathlib.Path(shown.user[name]).read_text(encoding="utf-8") for name in ("client-certificate", "client-key")]
    kubeconfig.run_plugin(dict(zip(("clientCertificateData", "clientKeyData"), pair, strict=True)))
    for each in (shown, kubeconfig):
        with pytest.raises(ForbiddenError, match='User "ada" cannot list resource "megatronjobs"'):
            each.names()
        with opened(each.arguments()) as cluster:
            assert cluster.bearer() is None


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (None, 3, "exec: process returned 3. log in first"),
        ({}, 0, "exec: missing token or clientCertificateData field in plugin output"),
    ],
)
def test_a_plugin_that_fails_is_reported_and_no_request_is_sent_without_credentials(
    kubeconfig: Kubeconfig, capsys: pytest.CaptureFixture[str], status: dict[str, Any] | None, code: int, why: str
) -> None:
    kubeconfig.run_plugin(status, code=code)
    assert cli.main(["get", "--kubeconfig", kubeconfig.arguments().kubeconfig]) == 1
    assert capsys.readouterr().err == f"error: no cluster: the kubeconfig's credential plugin failed: {why}\n"


def test_a_token_is_read_from_its_file(kubeconfig: Kubeconfig) -> None:
    kubeconfig.path.with_name("token").write_text(kubeconfig.user.pop("token"))
    kubeconfig.user["tokenFile"] = "token"  # relative to the kubeconfig
    assert kubeconfig.names() == ["demo"]


def test_files_of_a_list_are_merged(kubeconfig: Kubeconfig, monkeypatch: pytest.MonkeyPatch) -> None:
    users = kubeconfig.path.with_name("users")
    users.write_text(yaml.safe_dump({"users": kubeconfig.document.pop("users")}), encoding="utf-8")
    path = kubeconfig.arguments().kubeconfig
    monkeypatch.setenv("KUBECONFIG", f"{kubeconfig.path.with_name('absent')}:{path}:{users}")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with opened(argparse.Namespace(kubeconfig=None, context=None, namespace=None)) as cluster:
        assert [job.name for job in cluster.views()] == ["demo"]


def test_a_context_is_selected_with_its_namespace(kubeconfig: Kubeconfig, monkeypatch: pytest.MonkeyPatch) -> None:
    (context,) = kubeconfig.document["contexts"]
    kubeconfig.document["contexts"].append({"name": "other", "context": context["context"] | {"namespace": "else"}})
    arguments = kubeconfig.arguments()
    monkeypatch.setenv("MEGATRONAPP_CONTEXT", "other")
    with opened(arguments) as cluster:
        assert cluster.namespace == "else"
    arguments.context = context["name"]
    with opened(arguments) as cluster:
        assert cluster.namespace == context["context"]["namespace"]
    arguments.context = "none"
    with pytest.raises(
        OperatorError, match=r"^no cluster: .*none.*; name one by --kubeconfig FILE and --context NAME$"
    ):
        opened(arguments).__enter__()


@pytest.mark.parametrize("text", ["", "[", "clusters: [{}]", "current-context: x\n"])
def test_a_damaged_kubeconfig_is_reported(kubeconfig: Kubeconfig, text: str) -> None:
    arguments = kubeconfig.arguments()
    kubeconfig.path.write_text(text)
    with pytest.raises(OperatorError, match=r"^no cluster: (.|\n)*; name one by --kubeconfig FILE"):
        opened(arguments).__enter__()


def test_the_name_in_the_servers_certificate_is_checked(kubeconfig: Kubeconfig) -> None:
    kubeconfig.cluster["tls-server-name"] = "kubernetes.default"
    assert kubeconfig.names() == ["demo"]
    kubeconfig.cluster["tls-server-name"] = "other.example"
    with pytest.raises(UnavailableError, match=r"certificate is not valid for 'other\.example'"):
        kubeconfig.names()


def test_any_server_is_trusted_only_with_insecure_skip_tls_verify(kubeconfig: Kubeconfig) -> None:
    del kubeconfig.cluster["certificate-authority"]
    with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        kubeconfig.names()
    kubeconfig.cluster["insecure-skip-tls-verify"] = True
    assert kubeconfig.names() == ["demo"]


def test_a_proxy_is_used(kubeconfig: Kubeconfig) -> None:
    with proxy() as (url, tunnels):
        kubeconfig.cluster["proxy-url"] = url
        assert kubeconfig.names() == ["demo"]
    assert tunnels == [kubeconfig.cluster["server"].removeprefix("https://")]


def test_a_server_that_does_not_answer_is_reported_once(
    kubeconfig: Kubeconfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with reserved_ports(1) as (port,):  # bound, and not listened on
        kubeconfig.cluster["server"] = f"https://127.0.0.1:{port}"
        assert cli.main(["get", "--kubeconfig", kubeconfig.arguments().kubeconfig]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: GET /apis/megatronapp.io/v1alpha1/namespaces/")
    assert "Connection refused" in line


def test_a_missing_package_is_named(kubeconfig: Kubeconfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(OperatorError, match=r"pip install 'megatronapp-operator\[cluster\]'"):
        kubeconfig.names()


@contextlib.contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """An HTTP proxy that opens tunnels; its address, and the addresses that they lead to."""
    tunnels: list[str] = []

    class Tunnel(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            tunnels.append(self.path)
            host, _, port = self.path.partition(":")
            with socket.create_connection((host, int(port))) as server:
                self.send_response(200)
                self.end_headers()
                ends = {self.connection: server, server: self.connection}
                while True:
                    for end in select.select(list(ends), [], [])[0]:
                        data = end.recv(65536)
                        if not data:
                            self.close_connection = True
                            return
                        ends[end].sendall(data)

        def log_message(self, format: str, *args: object) -> None:
            """Write no log lines."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tunnel) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", tunnels
        finally:
            server.shutdown()
            thread.join()
