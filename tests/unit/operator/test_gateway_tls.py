"""TLS of the gateway: a real process, its certificate, what is served after a renewal, and the limit of connections."""

import asyncio
import pathlib
import re
import ssl
import subprocess
import sys
import time

import gateway
import httpx
import pytest
import yaml
from ports import reserved_ports
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from megatronapp_common.names import ExitCode
from megatronapp_common.web import server
from megatronapp_operator.controller.probes import ProbeServer
from megatronapp_operator.errors import BackendError
from megatronapp_operator.gateway.main import main, page_config
from megatronapp_operator.gateway.metrics import GatewayMetrics
from megatronapp_operator.gateway.tls import Certificate, serving

CURVE = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def write_certificate(
    folder: pathlib.Path, *, key: bool = True, kind: tuple[str, ...] = CURVE, password: bool = False
) -> ssl.SSLContext:
    """Write a new certificate for 127.0.0.1, and its key; return a client's context that trusts this one alone."""
    new = folder / "new"
    new.mkdir(exist_ok=True)
    command = ["openssl", "req", "-x509", "-newkey", *kind, *(["-passout", "pass:word"] if password else ["-nodes"])]
    command += ["-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(new / "tls.key"), "-out", str(new / "tls.crt")]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(cafile=str(new / "tls.crt"))
    (new / "tls.crt").replace(folder / "tls.crt")
    if key:
        (new / "tls.key").replace(folder / "tls.key")
    return context


def fetch(url: str, context: ssl.SSLContext) -> httpx.Response:
    return httpx.get(url, verify=context, trust_env=False, timeout=gateway.DEADLINE_S)


async def refusal(url: str, context: ssl.SSLContext) -> int:
    """Return the status by which a WebSocket is refused.

    The threaded client of `websockets` reads and writes a TLS connection at the same time, which OpenSSL does not
    permit: 8 of 1,400 of its requests got no answer.
    """
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, ssl=context, open_timeout=gateway.DEADLINE_S, proxy=None)
    return refused.value.response.status_code


def test_a_gateway_serves_its_pages_over_tls_and_takes_up_a_renewed_certificate(tmp_path: pathlib.Path) -> None:
    first = write_certificate(tmp_path)
    (tmp_path / "key").write_text("ab" * 32, encoding="ascii")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    log = tmp_path / "log"
    with reserved_ports(3) as (port, tls_port, metrics_port):
        flags = [f"--port={port}", f"--tls-port={tls_port}", f"--metrics-port={metrics_port}", "--host=127.0.0.1"]
        flags += [f"--key-file={tmp_path / 'key'}", f"--kubeconfig={tmp_path / 'kubeconfig'}", "--no-reviews"]
        flags += [f"--tls-cert={tmp_path / 'tls.crt'}", f"--tls-key={tmp_path / 'tls.key'}"]
        url = f"https://127.0.0.1:{tls_port}/healthz"

        def answers(context: ssl.SSLContext) -> bool:
            try:
                return fetch(url, context).is_success
            except httpx.TransportError:
                return False

        with gateway.process([sys.executable, "-m", "megatronapp_operator.gateway", *flags], log) as child:
            gateway.wait_for(lambda: answers(first), log)
            plain = httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False, timeout=gateway.DEADLINE_S)
            assert plain.is_success
            logged_in = httpx.post(
                f"https://127.0.0.1:{tls_port}/login", verify=first, trust_env=False, timeout=gateway.DEADLINE_S
            )
            assert logged_in.status_code == 401, logged_in.text
            live = f"wss://127.0.0.1:{tls_port}/api/v1/jobs/team/gpt/live"
            assert asyncio.run(refusal(live, first)) in {401, 403}
            second = write_certificate(tmp_path, kind=("rsa:2048",))  # clients prefer the curve where both are offered
            gateway.wait_for(lambda: answers(second), log)
            assert not answers(first)
            child.terminate()
            assert child.wait(gateway.DEADLINE_S) == 0, "it ends by itself, after both servers have"


def test_a_certificate_that_does_not_fit_its_key_leaves_the_last_in_use(tmp_path: pathlib.Path) -> None:
    write_certificate(tmp_path)
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    assert not certificate.renew()
    write_certificate(tmp_path, key=False)
    with pytest.raises(OSError, match=r"(?i)key values mismatch"):
        certificate.renew()
    write_certificate(tmp_path)
    assert certificate.renew()


@pytest.mark.parametrize("days", [30, -1], ids=["valid", "ended"])
def test_the_end_of_the_certificate_is_a_metric(tmp_path: pathlib.Path, days: int) -> None:
    write_certificate(tmp_path)
    chain, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    command = ["openssl", "x509", "-in", str(chain), "-signkey", str(key), "-days", str(days), "-out", str(chain)]
    subprocess.run(command, check=True, capture_output=True)
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    begin, end = certificate.validity or (0.0, 0.0)
    assert end - begin == pytest.approx(days * 86400, abs=60), "openssl reads the clock for each of them"
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    name = "megatron_gateway_certificate_not_after_timestamp_seconds"
    assert registry.get_sample_value(name) is None, "without TLS there is none"
    metrics.show_certificate(lambda: certificate.validity)
    assert registry.get_sample_value(name) == end
    assert registry.get_sample_value(name.replace("after", "before")) == begin
    write_certificate(tmp_path, kind=("rsa:2048", "-days", "60"))
    assert certificate.renew()
    assert (registry.get_sample_value(name) or 0) > time.time() + 59 * 86400


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tls-cert=tls.crt",), "--tls-cert needs --tls-key; write both"),
        (("--tls-key=tls.key",), "--tls-key needs --tls-cert"),
        (
            ("--tls-cert=none.crt", "--tls-key=none.key"),
            "No such file or directory.*name a certificate chain and its key",
        ),
    ],
)
def test_a_missing_certificate_is_named(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert main(["--key-file=none", *flags]) == ExitCode.USAGE
    assert re.search(message, capsys.readouterr().err)


def test_files_that_are_no_certificate_are_refused(tmp_path: pathlib.Path) -> None:
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).write_text("no certificate", encoding="ascii")
    with pytest.raises(BackendError, match="name a certificate chain and its key, in PEM"):
        Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")


def test_an_encrypted_key_is_refused_without_a_question(tmp_path: pathlib.Path) -> None:
    write_certificate(tmp_path, password=True)
    with pytest.raises(BackendError, match="the key is encrypted; write it without a password"):
        Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")


async def status_of(client: httpx.AsyncClient, url: str) -> int | None:
    try:
        return (await client.get(url)).status_code
    except httpx.TransportError:
        return None


@pytest.mark.parametrize("handshake_s", [3600.0, 0.5])
def test_a_connection_without_a_handshake_has_a_limit_and_an_end(tmp_path: pathlib.Path, handshake_s: float) -> None:
    context = write_certificate(tmp_path)
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")

    async def try_it() -> None:
        listener = server.listen("127.0.0.1", 0, stall_s=gateway.DEADLINE_S)
        port = listener.getsockname()[1]
        uvicorn = ProbeServer(page_config(Starlette()))
        async with (
            asyncio.timeout(gateway.DEADLINE_S),
            serving(uvicorn, listener, certificate, limit=2, handshake_s=handshake_s),
        ):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            if handshake_s < 1:
                assert [await reader.read() for reader, _ in silent] == [b"", b""], "they are let go"
                async with httpx.AsyncClient(verify=context, trust_env=False, timeout=gateway.DEADLINE_S) as client:
                    while await status_of(client, f"https://127.0.0.1:{port}/") != 404:
                        pass  # a slow computer may need more time for a handshake
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                assert await reader.read() == b"", "there is no room for a third"
                writer.close()
            for _, writer in silent:
                writer.close()
        assert listener.fileno() == -1

    asyncio.run(try_it())
