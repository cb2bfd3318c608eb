"""Requests to a gateway: certificates, proxies, and the note that a trace lacks something."""

import argparse
import contextlib
import http.server
import json
import pathlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from megatronapp_operator.cli.cluster import gateway_client, tokens, trace
from megatronapp_operator.cli.cluster.connection import ClusterJob
from megatronapp_operator.cli.cluster.gateway_client import GatewayEndpoint, call_gateway
from megatronapp_operator.errors import HubError

Capture = pytest.CaptureFixture[str]
TRACE = json.dumps({"traceEvents": [{"ph": "X"}]}).encode()


class Answering(http.server.BaseHTTPRequestHandler):
    """Gateway, or proxy, that answers each request with a trace."""

    omitted: ClassVar[str | None] = None

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(TRACE)))
        self.send_header("Asked-For", self.path)
        if self.omitted is not None:
            self.send_header("Megatronapp-Omitted", self.omitted)
        self.end_headers()
        self.wfile.write(TRACE)

    def log_message(self, *_: object) -> None:
        """Omit the log of requests."""


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve at a port of 127.0.0.1, which is yielded."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def certificate(tmp_path: pathlib.Path) -> pathlib.Path:
    """A certificate of 127.0.0.1 with its key, as of a company's own authority."""
    file = tmp_path / "tls.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(file), "-out", str(tmp_path / "crt")], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + (tmp_path / "crt").read_bytes())
    return file


@pytest.mark.parametrize("trusted", [True, False])
def test_a_url_is_trusted_by_the_certificates_of_the_system(
    certificate: pathlib.Path, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    refused = pytest.raises(HubError, match="CERTIFICATE_VERIFY_FAILED")
    with serving(context) as port, contextlib.nullcontext() if trusted else refused:
        assert call_gateway(GatewayEndpoint(f"https://127.0.0.1:{port}"), "GET", "/x", token="t").content == TRACE


def test_without_a_store_of_the_system_that_of_httpx_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    none = ssl.DefaultVerifyPaths(None, None, "", "", "", "")  # type: ignore[arg-type]
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: none)
    assert gateway_client._certificates() is True


def test_the_proxy_of_the_environment_is_for_urls_of_other_hosts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is meant for this host is never sent to a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving() as proxy, serving() as port:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        reached = {
            url: call_gateway(GatewayEndpoint(url), "GET", "/x", token="t").headers["Asked-For"]
            for url in ("http://gateway.invalid", f"http://127.0.0.1:{port}", f"http://localhost:{port}")
        }
    assert list(reached.values()) == ["http://gateway.invalid/x", "/x", "/x"]


@pytest.mark.parametrize(("omitted", "shown"), [(None, ""), ("the first 64 MiB", " (the first 64 MiB)")])
def test_the_output_of_an_export_includes_what_the_trace_lacks(
    omitted: str | None, shown: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    class Namespace:
        def view(self, name: str) -> ClusterJob:
            return ClusterJob({"metadata": {"name": name, "namespace": "team"}})

    monkeypatch.setattr(Answering, "omitted", omitted)
    monkeypatch.setattr(trace, "opened", lambda _arguments: contextlib.nullcontext(Namespace()))
    monkeypatch.setattr(tokens, "token_for", lambda *_: "t")
    output = tmp_path / "trace.json"
    given: dict[str, Any] = {"job": "gpt", "first": 0, "last": None, "verdict": None, "format": None}
    with serving() as port:
        found = GatewayEndpoint(f"http://127.0.0.1:{port}")
        monkeypatch.setattr(gateway_client, "open_gateway", lambda _cluster: contextlib.nullcontext(found))
        assert trace.main(argparse.Namespace(output=output, **given)) == 0
    assert f"1 spans, 0 arrows, from the running hub{shown}; open it" in capsys.readouterr().out
    assert output.read_bytes() == TRACE
