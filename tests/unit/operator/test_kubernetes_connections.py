"""Sockets that a session to an API server leaves open."""

import asyncio
import contextlib
import pathlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator

import psutil
import pytest
import yaml
from aiohttp import web

from megatronapp_operator.backends.kubernetes.client import connections
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, WatchLimits, connect
from megatronapp_operator.backends.kubernetes.client.resources import PODS

pytestmark = pytest.mark.asyncio


@contextlib.contextmanager
def silent_server(folder: pathlib.Path) -> Iterator[tuple[int, threading.Semaphore]]:
    """A TLS server that reads each request and then neither answers nor closes; its port, and the requests read."""
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=server"
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key", "-out", "crt")
    subprocess.run(["openssl", *options.split(), *names], check=True, capture_output=True, cwd=folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    read, open_here = threading.Semaphore(0), contextlib.ExitStack()

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = open_here.enter_context(context.wrap_socket(listening.accept()[0], server_side=True))
                connection.recv(1 << 16)
                read.release()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield listening.getsockname()[1], read
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            open_here.close()


def write_kubeconfig(folder: pathlib.Path, cluster: dict[str, str]) -> None:
    document = {
        "clusters": [{"name": "one", "cluster": cluster}],
        "users": [{"name": "one", "user": {"token": "none"}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "current-context": "one",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(document), encoding="utf-8")


async def test_a_session_leaves_no_socket_of_a_cancelled_request(tmp_path: pathlib.Path) -> None:
    with silent_server(tmp_path) as (port, read):
        write_kubeconfig(
            tmp_path, {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(tmp_path / "crt")}
        )
        async with connect(kubeconfig=str(tmp_path / "kubeconfig")) as api:
            requests = [asyncio.ensure_future(api.list_objects(PODS, "default")) for _ in range(2)]
            for _ in requests:
                await asyncio.to_thread(read.acquire)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
        async with asyncio.timeout(120):
            while left_open(port):  # for some turns of the event loop at most; the server never closes
                await asyncio.sleep(0.01)


def left_open(port: int) -> list[int]:
    """Descriptors of this process's connections to a port."""
    found = psutil.Process().net_connections("tcp")
    return [connection.fd for connection in found if connection.raddr and connection.raddr.port == port]


async def test_a_connection_that_stays_open_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "CLOSE_S", 0.0)
    made = connections.SocketTracker()
    address = socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 6443)
    with made.make(address), made.make(address) as closed:
        closed.close()
        await made.close()
        assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["('192.0.2.1', 6443)"]
    caplog.clear()
    await made.close()
    assert not caplog.records


async def test_watches_leave_connections_for_other_requests(tmp_path: pathlib.Path) -> None:
    """An operator of many namespaces watches each of them, and must still renew its lease."""
    watches, watched = 110, asyncio.Semaphore(0)

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"name": "a"}})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"\n")
        watched.release()
        await asyncio.Event().wait()
        return response

    async def watch(api: KubernetesApi) -> None:
        async for _ in api.watch(PODS, "here", labels="", version="1", limits=WatchLimits()):
            pass

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    write_kubeconfig(tmp_path, {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"})
    async with connect(kubeconfig=str(tmp_path / "kubeconfig"), connections=0) as api:
        tasks = [asyncio.create_task(watch(api)) for _ in range(watches)]
        try:
            async with asyncio.timeout(180):
                for _ in tasks:
                    await watched.acquire()
            assert await api.get(PODS, "here", "a") is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await runner.cleanup()
