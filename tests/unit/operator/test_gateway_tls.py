"""TLS of the gateway: a real process, its certificate, and what is served after the certificate is renewed."""

import pathlib
import re
import ssl
import subprocess
import sys

import gateway
import httpx
import pytest
import yaml
from ports import reserved_ports
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from megatronapp_common.names import ExitCode
from megatronapp_operator.errors import BackendError
from megatronapp_operator.gateway.__main__ import main
from megatronapp_operator.gateway.tls import Certificate


def write_certificate(folder: pathlib.Path, *, key: bool = True) -> ssl.SSLContext:
    """Write a new certificate for 127.0.0.1, and its key; return a client's context that trusts this one alone."""
    new = folder / "new"
    new.mkdir(exist_ok=True)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
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

        with gateway.process([sys.executable, "-m", "megatronapp_operator.gateway", *flags], log):
            gateway.wait_for(lambda: answers(first), log)
            plain = httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False, timeout=gateway.DEADLINE_S)
            assert plain.is_success
            logged_in = httpx.post(
                f"https://127.0.0.1:{tls_port}/login", verify=first, trust_env=False, timeout=gateway.DEADLINE_S
            )
            assert logged_in.status_code == 401, logged_in.text
            live = f"wss://127.0.0.1:{tls_port}/api/v1/jobs/team/gpt/live"
            with pytest.raises(InvalidStatus) as refused:
                connect(live, ssl=first, open_timeout=gateway.DEADLINE_S, proxy=None)
            assert refused.value.response.status_code in {401, 403}
            second = write_certificate(tmp_path)
            gateway.wait_for(lambda: answers(second), log)
            assert not answers(first)


def test_a_certificate_that_does_not_fit_its_key_leaves_the_last_in_use(tmp_path: pathlib.Path) -> None:
    write_certificate(tmp_path)
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    assert not certificate.renew()
    write_certificate(tmp_path, key=False)
    with pytest.raises(OSError, match=r"(?i)key values mismatch"):
        certificate.renew()
    write_certificate(tmp_path)
    assert certificate.renew()


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
