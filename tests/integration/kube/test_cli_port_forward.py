"""The port that `megatronapp` forwards through a real API server to a pod of the gateway's Service."""

import argparse
import asyncio
import contextlib
import hashlib
import http
import pathlib
import random
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gateway
import kube
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from megatronapp_operator.cli.cluster import port_forward
from megatronapp_operator.cli.cluster.connection import opened
from megatronapp_operator.cli.cluster.official_client import OfficialClient
from megatronapp_operator.cli.cluster.port_forward import ForwardedPort, forward_port
from megatronapp_operator.errors import OperatorError

LABELS = {"app": "gateway"}
RIGHTS = {"apiGroups": [""], "resources": ["pods", "pods/portforward"], "verbs": ["get", "list", "create"]}
LARGE = 5 << 20
Capture = pytest.CaptureFixture[str]


class Kubelet:
    """Fake kubelet of a node, which connects the WebSockets of an API server with local servers."""

    def __init__(self, plane: kube.ControlPlane, node: str) -> None:
        self.node = node
        self.servers: dict[str, int | str] = {}
        """For each pod the local port of its server, or the error that a connection gets."""
        self.connections: list[tuple[str, int]] = []
        """Pod and port of each connection so far."""
        certificates = plane.folder / "certificates"
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # the API server checks no certificate here
        self._tls.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")

    async def run(self, listener: socket.socket, stopped: asyncio.Event) -> None:
        protocols = [Subprotocol("v4.channel.k8s.io")]
        options = {"subprotocols": protocols, "compression": None, "process_request": self._check}
        async with serve(self._forward, sock=listener, ssl=self._tls, **options):  # type: ignore[arg-type]
            await stopped.wait()

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        if _pod(request) in self.servers:
            return None
        return connection.respond(http.HTTPStatus.NOT_FOUND, f"pod {_pod(request)!r} does not exist\n")

    async def _forward(self, stream: ServerConnection) -> None:
        assert stream.request is not None
        port = int(urllib.parse.parse_qs(urllib.parse.urlsplit(stream.request.path).query)["port"][0])
        self.connections.append((_pod(stream.request), port))
        for channel in range(2):
            await stream.send(bytes([channel]) + port.to_bytes(2, "little"))
        server = self.servers[_pod(stream.request)]
        if isinstance(server, str):
            await stream.send(b"\1" + server.encode())
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", server)
        receiving = asyncio.create_task(_write(stream, writer))
        try:
            while data := await reader.read(1 << 15):
                await stream.send(b"\0" + data)
        finally:
            receiving.cancel()
            writer.close()


async def _write(stream: ServerConnection, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(ConnectionClosed):
        while True:
            message = await stream.recv(decode=False)
            assert message[0] == 0
            writer.write(message[1:])
            await writer.drain()


def _pod(request: Request) -> str:
    return urllib.parse.urlsplit(request.path).path.rpartition("/")[2]  # /portForward/NAMESPACE/POD


@contextlib.contextmanager
def kubelet(plane: kube.ControlPlane, node: str) -> Iterator[Kubelet]:
    """Run a kubelet, and create its node."""
    running, stopped = Kubelet(plane, node), asyncio.Event()
    with asyncio.Runner() as runner, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=runner.run, args=(running.run(listener, stopped),))
        runner.get_loop()
        thread.start()
        try:
            gateway.create(plane, "/api/v1/nodes", {"metadata": {"name": node}})
            status = {
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            }
            gateway.patch(plane, f"/api/v1/nodes/{node}/status", {"status": status})
            yield running
        finally:
            runner.get_loop().call_soon_threadsafe(stopped.set)
            thread.join()


@pytest.fixture
def node(plane: kube.ControlPlane, namespace: str) -> Iterator[Kubelet]:
    with kubelet(plane, f"node-{namespace}") as running:
        yield running


@pytest.fixture
def place(plane: kube.ControlPlane, namespace: str, node: Kubelet) -> "GatewayNamespace":
    return GatewayNamespace(plane, namespace, node)


class GatewayNamespace:
    """Namespace with a Service, whose pods run on a node."""

    def __init__(self, plane: kube.ControlPlane, namespace: str, node: Kubelet) -> None:
        self.plane, self.namespace, self.node = plane, namespace, node
        self.service: dict[str, Any] = {
            "metadata": {"namespace": namespace, "name": "megatronapp"},
            "spec": {"selector": LABELS, "ports": [{"port": 80, "targetPort": "http"}]},
        }

    def add_pod(self, name: str, server: int | str, *, ready: bool = True) -> None:
        """Create a running pod whose port `http` is this server, or fails so."""
        self.node.servers[name] = server
        container = {"name": "gateway", "image": "none", "ports": [{"name": "http", "containerPort": 8080}]}
        body = {
            "metadata": {"name": name, "labels": LABELS},
            "spec": {"nodeName": self.node.node, "containers": [container]},
        }
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        gateway.create(self.plane, pods, body)
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions}
        gateway.patch(self.plane, f"{pods}/{name}/status", {"status": status})

    def remove_pod(self, name: str) -> None:
        """Remove a pod at once."""
        options = {"gracePeriodSeconds": 0}
        with self.plane.client() as client:
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
            assert client.request("DELETE", path, json=options).is_success
        del self.node.servers[name]

    @contextlib.contextmanager
    def forwarded(self, kubeconfig: pathlib.Path | None = None) -> Iterator[ForwardedPort]:
        """Forward a port to the Service."""
        path = str(kubeconfig or self.plane.kubeconfig())
        arguments = argparse.Namespace(kubeconfig=path, context=None, namespace=self.namespace)
        with opened(arguments) as cluster, forward_port(cluster, self.service) as forward:
            yield forward


@contextlib.contextmanager
def answering(answer: bytes = b"") -> Iterator[int]:
    """Run a server that reads a line, answers and closes the connection; without an answer it returns the line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # shut down
                while True:
                    threading.Thread(target=respond, args=(listener.accept()[0],)).start()

        def respond(connection: socket.socket) -> None:
            with contextlib.suppress(ConnectionError), connection, connection.makefile("rb") as lines:
                line = lines.readline()
                connection.sendall(answer or line)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def ask(forward: ForwardedPort, text: str = "hello\n", *, half_close: bool = False) -> bytes:
    """Send a text and return the whole answer; nothing if the connection is reset."""
    with socket.create_connection(("127.0.0.1", forward.port)) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(text.encode())
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            return stream.read()
    return b""


def test_many_connections_at_once_get_whole_answers(place: GatewayNamespace) -> None:
    answer = random.Random(0).randbytes(LARGE)
    with answering(answer) as server:
        place.add_pod("one", server)
        with place.forwarded() as forward, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: hashlib.sha256(ask(forward)).digest(), range(16)))
    assert answers == [hashlib.sha256(answer).digest()] * 16
    assert set(place.node.connections) == {("one", 8080)}


def test_a_port_is_forwarded_inside_of_a_running_event_loop(place: GatewayNamespace) -> None:
    """Cells of a notebook run in one."""

    async def cell() -> bytes:
        with place.forwarded() as forward:
            return await asyncio.to_thread(ask, forward, "a line\n")

    with answering() as server:
        place.add_pod("one", server)
        assert asyncio.run(cell()) == b"a line\n"


def test_what_is_sent_arrives(place: GatewayNamespace) -> None:
    text = f"{'x' * LARGE}\n"
    with answering() as server:
        place.add_pod("one", server)
        with place.forwarded() as forward:
            assert ask(forward, text) == text.encode()
            assert ask(forward, "end\n", half_close=True) == b"end\n"
            with socket.create_connection(("::1", forward.port)) as connection:
                connection.sendall(b"v6\n")
                assert connection.recv(9) == b"v6\n"


def test_a_ready_pod_is_preferred_and_kept(place: GatewayNamespace) -> None:
    with answering() as server:
        place.add_pod("a", server, ready=False)
        place.add_pod("c", server)
        with place.forwarded() as forward:
            place.add_pod("b", server)
            for _ in range(3):
                ask(forward)
    assert {pod for pod, _ in place.node.connections} == {"c"}


def test_the_port_is_kept_while_no_pod_runs(place: GatewayNamespace, capsys: Capture) -> None:
    with answering() as server:
        place.add_pod("one", server)
        with place.forwarded() as forward:
            assert ask(forward) == b"hello\n"
            place.remove_pod("one")
            assert [ask(forward) for _ in range(3)] == [b""] * 3
            place.add_pod("two", server)
            assert ask(forward) == b"hello\n"
    problem = f"no pod of Service {place.namespace}/megatronapp is running"
    assert capsys.readouterr().err == f"warning: the gateway cannot be reached: {problem}\n"


def test_an_error_of_the_kubelet_is_reported_and_another_pod_is_found(place: GatewayNamespace, capsys: Capture) -> None:
    with answering() as server:
        place.add_pod("one", "port 8080: connection refused")
        with place.forwarded() as forward:
            assert ask(forward) == b""
            place.add_pod("a", server)
            assert ask(forward) == b"hello\n"
    assert capsys.readouterr().err == "warning: the gateway cannot be reached: port 8080: connection refused\n"


def test_open_connections_end_with_the_command(
    place: GatewayNamespace, caplog: pytest.LogCaptureFixture, capsys: Capture
) -> None:
    with answering() as server:
        place.add_pod("one", server)
        with place.forwarded() as forward:
            connection = socket.create_connection(("127.0.0.1", forward.port))
            gateway.wait_for(lambda: len(place.node.connections) == 2)  # that of the check, and this
        with connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            ask(forward)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    assert capsys.readouterr().err == ""


def test_the_pods_side_ends_after_the_local_side(place: GatewayNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forward, "IDLE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place.add_pod("one", listener.getsockname()[1])
        with place.forwarded() as forward:
            listener.accept()[0].close()  # that of the check
            socket.create_connection(("127.0.0.1", forward.port)).close()
            connection = listener.accept()[0]
            with connection:
                connection.settimeout(120)
                assert connection.recv(1) == b""


def test_the_end_does_not_wait_for_a_credential_plugin(
    place: GatewayNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, release, returned = (threading.Event() for _ in range(3))

    def authorization(client: OfficialClient) -> None:
        called.set()
        release.wait(120)
        returned.set()

    with answering() as server:
        place.add_pod("one", server)
        with place.forwarded() as forward:
            monkeypatch.setattr(OfficialClient, "authorization", authorization)
            connection = socket.create_connection(("127.0.0.1", forward.port))
            assert called.wait(120)
        connection.close()
        assert not returned.is_set()
        release.set()
        assert returned.wait(120)


def test_a_client_certificate_opens_the_way(place: GatewayNamespace, tmp_path: pathlib.Path) -> None:
    path = gateway.certified(place.plane, tmp_path, "eve", namespace=place.namespace)
    with answering() as server:
        place.add_pod("one", server)
        refused = pytest.raises(OperatorError, match=r'^the port of the gateway cannot be forwarded: GET .*User "eve"')
        with refused, place.forwarded(path):
            pass
        rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{place.namespace}"
        gateway.create(place.plane, f"{rbac}/roles", {"metadata": {"name": "ports"}, "rules": [RIGHTS]})
        group = "rbac.authorization.k8s.io"
        body = {
            "metadata": {"name": "eve"},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "ports"},
            "subjects": [{"kind": "User", "name": "eve", "apiGroup": group}],
        }
        gateway.create(place.plane, f"{rbac}/rolebindings", body)
        with place.forwarded(path) as forward:
            assert ask(forward) == b"hello\n"


@pytest.mark.parametrize(
    ("granted", "missing"), [("create", 'cannot get resource "pods/portforward"'), ("get", 'pods "one" is forbidden')]
)
def test_a_missing_right_to_forward_ports_is_named(
    place: GatewayNamespace, tmp_path: pathlib.Path, granted: str, missing: str
) -> None:
    rights = [{**RIGHTS, "resources": ["pods"]}, {**RIGHTS, "resources": ["pods/portforward"], "verbs": [granted]}]
    token = gateway.account(place.plane, place.namespace, "poor", grants=rights)
    path = gateway.kubeconfig(place.plane, tmp_path, token, namespace=place.namespace)
    place.add_pod("one", 1)
    with pytest.raises(OperatorError, match=f"{missing}.*; request the rights that `gateway.users`"):
        place.forwarded(path).__enter__()
    assert not place.node.connections


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"selector": {}}, "selects no pods"),
        ({"selector": {"app": "other"}}, "no pod of Service .* is running"),
        ({"ports": [{"port": 80, "targetPort": "grpc"}]}, "pod one has no port 'grpc'"),
    ],
)
def test_a_service_that_leads_to_no_pod_is_reported(
    place: GatewayNamespace, change: dict[str, Any], problem: str
) -> None:
    place.add_pod("one", 1)
    place.service["spec"] |= change
    with pytest.raises(OperatorError, match=f"^the port of the gateway cannot be forwarded: .*{problem}"):
        place.forwarded().__enter__()
