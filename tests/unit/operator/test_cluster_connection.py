"""Search of the subcommands for their cluster, and answers that do not end."""

import argparse
import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from megatronapp_operator.backends.kubernetes.client.errors import UnavailableError
from megatronapp_operator.backends.kubernetes.client.resources import JOBS
from megatronapp_operator.cli import cluster
from megatronapp_operator.cli.cluster import CONTEXT_VARIABLE, connection, official_client
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob, opened
from megatronapp_operator.cli.cluster.logs import WorkerLog
from megatronapp_operator.errors import OperatorError

OK = b"HTTP/1.1 200 OK\r\n"


def named(kubeconfig: str | None) -> argparse.Namespace:
    return argparse.Namespace(kubeconfig=kubeconfig, context=None, namespace=None)


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_kubeconfig_that_is_not_there_is_called_so_and_nothing_else(
    by_flag: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    absent = str(tmp_path / "absent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", "" if by_flag else absent)
    refused = pytest.raises(OperatorError, match=f"^no cluster: {absent} does not exist; name one by --kubeconfig")
    with refused, opened(named(absent if by_flag else None)):
        pytest.fail("there is a cluster")
    assert caplog.text == ""


def test_commands_import_neither_numpy_nor_the_client_of_the_operator_nor_before_its_use_the_official_one() -> None:
    folder = pathlib.Path(cluster.__file__).parent
    names = ", ".join(f"{cluster.__name__}.{path.stem}" for path in sorted(folder.glob("[a-z]*.py")))
    program = f"import sys, {names}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert {"aiohttp", "kubernetes_asyncio", "kubernetes", "kopf", "numpy"}.isdisjoint(done.stdout.split())


@contextlib.contextmanager
def answered(folder: pathlib.Path, begin: bytes, part: bytes = b"") -> Iterator[Cluster]:
    """Connect to a server that answers with `begin`, then with `part` again and again, and closes the connection."""
    left = threading.Event()

    def answer(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted, contextlib.suppress(OSError):
            accepted.recv(1 << 16)
            accepted.sendall(begin)
            while part and not left.wait(0.03):
                accepted.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer, args=(listener,), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        clusters = [{"name": "c", "cluster": {"server": url}}]
        contexts = [{"name": "c", "context": {"cluster": "c", "user": ""}}]
        config = folder / "config"
        config.write_text(json.dumps({"clusters": clusters, "contexts": contexts, "current-context": "c"}))
        try:
            with opened(named(str(config))) as found:
                yield found
        finally:
            left.set()
            server.join(120)


@pytest.mark.parametrize(
    ("begin", "part"),
    [(OK + b"X: ", b"y"), (OK + b"Content-Length: 1000000\r\n\r\n", b" "), (OK + b"\r\n", b" ")],
    ids=["head", "body", "body of unknown length"],
)
def test_a_request_has_a_limit_also_while_its_answer_arrives(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, begin: bytes, part: bytes
) -> None:
    monkeypatch.setattr(connection, "REQUEST_S", 0.3)
    with answered(tmp_path, begin, part) as found:
        with pytest.raises(UnavailableError, match=r"^GET /apis/\S+/demo: no complete answer in 0.3 s$") as caught:
            found.get(JOBS, "default", "demo")
        assert caught.value.status == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_log_that_ends_before_its_length_broke_off(tmp_path: pathlib.Path, missing: int) -> None:
    text = b"one\ntwo\n"
    job, pod = ClusterJob({"metadata": {"name": "demo", "namespace": "default"}}), {"metadata": {"name": "p"}}
    length = b"Content-Length: %d\r\n\r\n" % (len(text) + missing)
    broken = pytest.raises(UnavailableError, match="the log of p broke off")
    with answered(tmp_path, OK + length + text) as found:
        lines = WorkerLog(found, job, worker=0, rank=None, attempt=None).lines(pod)
        assert [next(lines), next(lines)] == ["one", "two"]
        with broken if missing else contextlib.nullcontext():
            assert list(lines) == []


@pytest.mark.parametrize(("stored", "namespace"), [("research\n", "research"), (None, "default")])
def test_a_pod_uses_its_service_account_in_its_namespace(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, stored: str | None, namespace: str
) -> None:
    from kubernetes.config import incluster_config

    for name, file in (("SERVICE_TOKEN_FILENAME", "token"), ("SERVICE_CERT_FILENAME", "ca.crt")):
        (tmp_path / file).write_text(file)
        monkeypatch.setattr(incluster_config, name, str(tmp_path / file))
    if stored is not None:
        (tmp_path / "namespace").write_text(stored)
    monkeypatch.setattr(official_client, "POD_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.delenv(CONTEXT_VARIABLE, raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with contextlib.closing(official_client.OfficialClient(None, None)) as client:
        assert (client.namespace, client.settings.host) == (namespace, "https://10.0.0.1:443")
