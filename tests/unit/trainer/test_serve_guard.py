"""Checks in front of the API, over real sockets and without a model: connections, sizes, names of hosts."""

import asyncio
import concurrent.futures
import contextlib
import functools
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from shared_tls import SHARED_TLS

from megatronapp_common.web import server
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

SECRET = new_secret()
KEY = derive_token(SECRET, TokenRole.SERVE)
MIB = 1 << 20
DEADLINE_S = 120.0


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of at most 8 requests and 16 connections; gives its port."""
    from megatronapp_trainer.serve import app as web
    from megatronapp_trainer.serve.connection_limit import EvictingProtocol
    from megatronapp_trainer.serve.request_broker import RequestBroker
    from megatronapp_trainer.serve.statistics import ServerStatistics

    monkeypatch.setattr(web, "SPARE_REQUESTS", 6)
    monkeypatch.setattr(web, "SPARE_CONNECTIONS", 8)
    patient = functools.partial(server.server_config, timeout_keep_alive=int(DEADLINE_S))
    monkeypatch.setattr(server, "server_config", patient)
    with contextlib.ExitStack() as stack:

        def start(
            secret: str | None,
            *,
            head_s: float = 60.0,
            stall_s: float = 60.0,
            route: Callable[..., Any] | None = None,
            stopping: Callable[[], bool] = lambda: False,
        ) -> int:
            monkeypatch.setattr(EvictingProtocol, "head_s", head_s)
            monkeypatch.setattr(EvictingProtocol, "stall_s", stall_s)
            sock = web.listen("127.0.0.1", 0)
            port: int = sock.getsockname()[1]
            broker = RequestBroker(most_open=2, statistics=ServerStatistics())
            broker.is_stopping = stopping
            app = web.create_app(broker, secret=secret)
            if route is not None:
                app.add_api_route("/route", route)
            stack.enter_context(web.served(app, sock))
            return port

        yield start


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def request_status(port: int, path: str, *, method: str = "GET", body: bytes = b"", **headers: str) -> int:
    """Status of an answer."""
    with connected(port) as sock:
        return request_on(sock, path, method=method, body=body, **headers)


def request_on(sock: socket.socket, path: str, *, method: str = "GET", body: bytes = b"", **headers: str) -> int:
    all_headers = {"host": "localhost", "content-length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    sock.sendall(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode())
    with contextlib.suppress(ConnectionError):  # it need not read what it refuses
        sock.sendall(body)
    return int(sock.recv(4096).split()[1])


def ended(sock: socket.socket) -> bool:
    """The server has let go of it."""
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def test_idle_connections_yield_their_places_to_active_ones(serve: Any) -> None:
    port = serve(SECRET)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(port)) for _ in range(40)]
        for path, expected in (("/healthz", 200), ("/readyz", 503), ("/v1/models", 401)):
            assert request_status(port, path) == expected
        assert ended(idle[0])
        assert request_on(idle[-1], "/healthz") == 200


def test_bodies_sent_to_probe_endpoints_are_not_read(serve: Any) -> None:
    port = serve(SECRET)
    bodies: list[dict[str, Any]] = [
        {"content_length": "4194304", "expect": "100-continue"},
        {"transfer_encoding": "chunked"},
    ]
    for headers in bodies:
        with connected(port) as sock:
            assert request_on(sock, "/readyz", method="POST", **headers) == 405, "at once, and before anything has come"
            assert read(sock, MIB) < MIB, "and then ends"


def test_strangers_whatever_they_do_give_their_places_and_who_has_the_token_does_not(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.requests import Request

    from megatronapp_trainer.serve import middleware

    reached = threading.Semaphore(0)

    async def route(request: Request) -> None:
        reached.release()
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(middleware, "OPEN", middleware.OPEN | {"/route"})
    port = serve(SECRET, route=route)
    key: dict[str, Any] = {"authorization": f"Bearer {KEY}"}
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(connected(port))
        assert request_on(mine, "/nothing", content_length="1", expect="100-continue", **key) == 100
        busy = []
        for _ in range(20):
            busy.append(stack.enter_context(connected(port)))
            busy[-1].sendall(b"GET /route HTTP/1.1\r\nHost: a\r\n\r\n")
            assert reached.acquire(timeout=DEADLINE_S)
        assert [request_status(port, "/healthz"), request_status(port, "/v1/models", **key)] == [200, 503]
        assert ended(busy[0])
        mine.sendall(b"a")
        assert mine.recv(4096).startswith(b"HTTP/1.1 404")


def test_a_connection_without_a_complete_head_is_closed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatronapp_trainer.serve.connection_limit import EvictingProtocol

    port = serve(SECRET, head_s=0.2)
    with connected(port) as silent, connected(port) as slow:
        with contextlib.suppress(ConnectionError):  # it may be over already
            slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
        assert ended(silent)
        assert ended(slow)
    monkeypatch.setattr(EvictingProtocol, "head_s", DEADLINE_S)
    assert request_status(port, "/healthz") == 200


def test_a_client_that_reads_nothing_of_a_stream_is_disconnected(serve: Any) -> None:
    from starlette.responses import StreamingResponse

    over = threading.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"a" * MIB
                await asyncio.sleep(0)
        finally:
            over.set()

    async def route() -> StreamingResponse:
        return StreamingResponse(endless())

    port = serve(SECRET, stall_s=0.2, route=route)
    with connected(port) as sock:
        assert request_on(sock, "/route", authorization=f"Bearer {KEY}") == 200
        assert over.wait(DEADLINE_S)


LARGE = 6 * MIB


async def large_answer() -> Any:
    from starlette.responses import Response

    return Response(b"a" * LARGE)


def reader(port: int) -> socket.socket:
    """Request a large answer, of which little fits between it and the server."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.settimeout(DEADLINE_S)
    sock.connect(("127.0.0.1", port))
    head = f"GET /route HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    sock.sendall(head.encode())
    return sock


class Stalls:
    """Stalls of the connection's reader, whose time runs out when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatronapp_trainer.serve.connection_limit import EvictingProtocol

        self.lost = threading.Event()
        made, lost = EvictingProtocol.connection_made, EvictingProtocol.connection_lost

        def keep(protocol: Any, transport: Any) -> None:
            made(protocol, transport)
            self._protocol = protocol

        def end(protocol: Any, error: Exception | None) -> None:
            lost(protocol, error)
            self.lost.set()

        monkeypatch.setattr(EvictingProtocol, "connection_made", keep)
        monkeypatch.setattr(EvictingProtocol, "connection_lost", end)

    def run_out(self) -> None:
        over = threading.Event()

        def fire() -> None:
            timer = self._protocol._stall
            if timer is not None:
                callback = timer._callback
                timer.cancel()
                callback()
            over.set()

        self._protocol.loop.call_soon_threadsafe(fire)
        assert over.wait(DEADLINE_S)


def read(sock: socket.socket, most: int) -> int:
    got = 0
    while got < most and (part := sock.recv(min(MIB, most - got))):
        got += len(part)
    return got


def test_a_large_answer_may_take_long_as_long_as_it_is_read(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = Stalls(monkeypatch)
    port = serve(SECRET, route=large_answer)
    got = 0
    with reader(port) as sock:
        for _ in range(4):
            got += read(sock, MIB)
            stalls.run_out()
        got += read(sock, LARGE)
    assert got > LARGE


def test_a_client_that_stops_reading_a_large_answer_is_disconnected(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = Stalls(monkeypatch)
    port = serve(SECRET, route=large_answer)
    with reader(port) as sock:
        assert read(sock, MIB) == MIB
        while not stalls.lost.is_set():
            stalls.run_out()


def test_who_reads_an_answer_still_is_not_closed_for_another(serve: Any) -> None:
    port = serve(SECRET, route=large_answer)
    with reader(port) as sock, contextlib.ExitStack() as stack:
        assert read(sock, MIB) == MIB
        for _ in range(24):
            stack.enter_context(connected(port))
            assert request_status(port, "/healthz") == 200
        assert MIB + read(sock, LARGE) > LARGE


def test_more_requests_than_are_worked_on_are_refused_and_probes_are_not(serve: Any) -> None:
    port = serve(SECRET)
    key: dict[str, Any] = {"authorization": f"Bearer {KEY}"}
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connected(port)) for _ in range(8)]
        statuses = [request_on(sock, "/nothing", content_length="1", expect="100-continue", **key) for sock in waiting]
        assert statuses == [100] * 8, "each body is waited for"
        assert [request_status(port, path, **key) for path in ("/nothing", "/healthz", "/nothing")] == [503, 200, 503]
        waiting[0].sendall(b"a")
        assert waiting[0].recv(4096).startswith(b"HTTP/1.1 404")
        assert request_status(port, "/nothing", **key) == 404


BASIS = "PUT", "/scope/v1/basis"
BODIES = [
    (BASIS, 5 * MIB, True, 503),
    (BASIS, 64 * MIB + 1, True, 413),
    (BASIS, 64 * MIB, False, 401),
    (("POST", "/v1/completions"), 4 * MIB + 1, True, 413),
    (("POST", "/scope/v1/basis"), 4 * MIB + 1, True, 413),
]


@pytest.mark.parametrize(("route", "size", "known", "status"), BODIES)
def test_a_basis_may_be_larger_than_other_bodies_for_who_has_the_token(
    serve: Any, route: tuple[str, str], size: int, known: bool, status: int
) -> None:
    port, (method, path) = serve(SECRET), route
    headers = {"content_length": str(size), "authorization": f"Bearer {KEY if known else 'wrong'}"}
    body = b"a" * size if status == 503 else b"a"  # a large body is refused before it is received
    assert request_status(port, path, method=method, body=body, **headers) == status


def test_a_body_of_unknown_size_is_read_up_to_its_bound(serve: Any) -> None:
    port = serve(SECRET)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n"
    chunk = b"100000\r\n" + b"a" * MIB + b"\r\n"
    with connected(port) as sock:
        with contextlib.suppress(ConnectionError):  # it need not read what is beyond
            sock.sendall(f"{head}\r\n".encode() + chunk * 5)
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")


def request(path: str, body: bytes = b"") -> bytes:
    """Return a request of the API as bytes on the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_requests_that_follow_without_waiting_are_answered_in_their_order(serve: Any) -> None:
    port = serve(SECRET)
    large = b'{"prompt": "' + b"a" * (3 * MIB) + b'", "max_tokens": -1}'
    wire = request("/v1/completions", large) + request("/nothing") + request("/v1/completions", large)
    with connected(port) as sock, concurrent.futures.ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sock.sendall, wire + b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        with sock.makefile("rb") as answers:
            found = re.findall(rb"HTTP/1.1 (\d+)", answers.read())
        sent.result()
    assert found == [b"503", b"404", b"503", b"200"]


def test_a_connection_serves_requests_in_sequence(serve: Any) -> None:
    port = serve(SECRET)
    with httpx.Client(
        trust_env=False, verify=SHARED_TLS, headers={"Authorization": f"Bearer {KEY}"}, timeout=DEADLINE_S
    ) as client:
        ends = set()
        for path, status in (("/healthz", 200), ("/v1/models", 503), ("/nothing", 404)) * 4:
            with client.stream("GET", f"http://127.0.0.1:{port}{path}") as answer:
                assert answer.status_code == status
                ends.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
                answer.read()
    assert len(ends) == 1


HOSTS = [
    ("localhost", 503),
    ("localhost:8000", 503),
    ("serve-12.localhost:8000", 503),
    ("127.0.0.1", 503),
    ("127.1.2.3:80", 503),
    ("[::1]:80", 503),
    ("evil.example", 421),
    ("localhost.evil.example", 421),
    ("127.0.0.1.evil.example:80", 421),
    ("10.0.0.1", 421),
    ("[::1", 421),
]


def test_without_a_key_only_names_of_this_host_are_answered(serve: Any) -> None:
    port = serve(None)
    found = [(host, request_status(port, "/v1/models", host=host)) for host, _ in HOSTS]
    assert found == HOSTS
    assert request_status(port, "/v1/models", host="evil.example", origin="http://evil.example") == 421
    assert request_status(port, "/v1/models", host="localhost", origin="http://evil.example") == 403


def test_with_a_key_any_name_will_do(serve: Any) -> None:
    port = serve(SECRET)
    assert request_status(port, "/v1/models", host="demo-serve.team.svc", authorization=f"Bearer {KEY}") == 503


def test_a_stopping_server_reports_it_at_once(serve: Any) -> None:
    stop_requested = threading.Event()
    port = serve(SECRET, stopping=stop_requested.is_set)
    for expected in ("starting", "stopping"):
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, verify=SHARED_TLS, timeout=DEADLINE_S)
        assert (answer.status_code, answer.json()) == (503, {"status": expected})
        stop_requested.set()
