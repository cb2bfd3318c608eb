"""The server of probes and metrics, with real sockets."""

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry, Gauge

from megatronapp_operator.controller import probes
from megatronapp_operator.errors import SettingsError

HANGS_S = 120


@pytest.mark.asyncio
async def test_a_scraper_that_reads_nothing_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SHUTDOWN_S", 1)
    registry = CollectorRegistry()
    gauge = Gauge("megatron_large", "More than the kernel keeps for a reader.", ["name"], registry=registry)
    for number in range(200):
        gauge.labels(f"{number}{'x' * 100_000}").set(1)
    server = probes.create_server(probes.create_app(registry, alive=lambda: None, ready=lambda: None))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANGS_S):
        with socket.socket() as scraper:
            scraper.setblocking(False)
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            async with probes.run_server(server, 0) as port:
                while not server.started:
                    await asyncio.sleep(0.01)
                await loop.sock_connect(scraper, ("127.0.0.1", port))
                await loop.sock_sendall(scraper, b"GET /metrics HTTP/1.1\r\nHost: operator\r\n\r\n")
                assert await loop.sock_recv(scraper, 12) == b"HTTP/1.1 200"
        while server.server_state.connections:  # which end with their peer
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
async def test_a_kubelet_asks_over_either_family(family: int, address: str) -> None:
    app = probes.create_app(CollectorRegistry(), alive=lambda: None, ready=lambda: None)
    server, loop = probes.create_server(app), asyncio.get_running_loop()
    async with asyncio.timeout(HANGS_S), probes.run_server(server, 0) as port:
        with socket.socket(family) as kubelet:
            kubelet.setblocking(False)
            await loop.sock_connect(kubelet, (address, port))
            await loop.sock_sendall(kubelet, b"GET /readyz HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")
            assert (await loop.sock_recv(kubelet, 1024)).startswith(b"HTTP/1.1 200")


@pytest.mark.asyncio
async def test_a_port_in_use_is_named() -> None:
    app = probes.create_app(CollectorRegistry(), alive=lambda: None, ready=lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--port {port}: "):
            async with probes.run_server(probes.create_server(app), port):
                pass
