"""What stands in front of the API, over real sockets and without a model: connections, sizes, names of hosts."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from megatronapp_common.tokens import Role, derive, new_secret

SECRET = new_secret()
KEY = derive(SECRET, Role.SERVE)
MIB = 1 << 20


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of at most 8 requests and 16 connections; gives its port."""
    from megatronapp_trainer.serve import protocol, web
    from megatronapp_trainer.serve.desk import Desk
    from megatronapp_trainer.serve.tally import Tally

    monkeypatch.setattr(web, "SPARE_REQUESTS", 6)
    monkeypatch.setattr(web, "SPARE_CONNECTIONS", 8)
    with contextlib.ExitStack() as stack:

        def start(
            secret: str | None,
            *,
            head_s: float = 60.0,
            stall_s: float = 60.0,
            route: Callable[..., Any] | None = None,
            stopping: Callable[[], bool] = lambda: False,
        ) -> int:
            monkeypatch.setattr(protocol, "HEAD_S", head_s)
            monkeypatch.setattr(protocol, "STALL_S", stall_s)
            sock = web.listen("127.0.0.1", 0)
            port: int = sock.getsockname()[1]
            desk = Desk(most_open=2, tally=Tally())
            desk.is_stopping = stopping
            app = web.create_app(desk, secret=secret)
            if route is not None:
                app.add_api_route("/route", route)
            stack.enter_context(web.served(app, sock))
            return port

        yield start


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def ask(port: int, path: str, *, method: str = "GET", body: bytes = b"", **headers: str) -> int:
    """Status of an answer."""
    with connected(port) as sock:
        return ask_on(sock, path, method=method, body=body, **headers)


def ask_on(sock: socket.socket, path: str, *, method: str = "GET", body: bytes = b"", **headers: str) -> int:
    told = {"host": "localhost", "content-length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    sock.sendall(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode())
    with contextlib.suppress(ConnectionError):  # it need not read what it refuses
        sock.sendall(body)
    return int(sock.recv(4096).split()[1])


def ended(sock: socket.socket) -> bool:
    """The server has let go of it."""
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def test_connections_that_ask_nothing_give_their_places_to_those_that_do(serve: Any) -> None:
    port = serve(SECRET)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(port)) for _ in range(40)]
        for path, wanted in (("/healthz", 200), ("/readyz", 503), ("/v1/models", 401)):
            assert ask(port, path) == wanted
        assert ended(idle[0])
        assert ask_on(idle[-1], "/healthz") == 200


def test_a_head_that_does_not_come_ends_its_connection(serve: Any) -> None:
    port = serve(SECRET, head_s=0.2)
    with connected(port) as silent, connected(port) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
        assert ended(silent)
        assert ended(slow)
    assert ask(port, "/healthz") == 200


def test_who_reads_nothing_of_an_answer_is_cut_off(serve: Any) -> None:
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
        assert ask_on(sock, "/route", authorization=f"Bearer {KEY}") == 200
        assert over.wait(30)


def test_more_requests_than_are_worked_on_are_refused_and_probes_are_not(serve: Any) -> None:
    port = serve(SECRET)
    key: dict[str, Any] = {"authorization": f"Bearer {KEY}"}
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connected(port)) for _ in range(8)]
        told = [ask_on(sock, "/nothing", content_length="1", expect="100-continue", **key) for sock in waiting]
        assert told == [100] * 8, "each body is waited for"
        assert [ask(port, path, **key) for path in ("/nothing", "/healthz", "/nothing")] == [503, 200, 503]
        waiting[0].sendall(b"a")
        assert waiting[0].recv(4096).startswith(b"HTTP/1.1 404")
        assert ask(port, "/nothing", **key) == 404


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
    told = {"content_length": str(size), "authorization": f"Bearer {KEY if known else 'wrong'}"}
    body = b"a" * size if status == 503 else b"a"  # what is refused is refused before it has come
    assert ask(port, path, method=method, body=body, **told) == status


def test_a_body_of_unknown_size_is_read_up_to_its_bound(serve: Any) -> None:
    port = serve(SECRET)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n"
    chunk = b"100000\r\n" + b"a" * MIB + b"\r\n"
    with connected(port) as sock:
        sock.sendall(f"{head}\r\n".encode() + chunk * 5)
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")


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


def test_without_a_key_only_names_of_this_machine_are_answered(serve: Any) -> None:
    port = serve(None)
    found = [(host, ask(port, "/v1/models", host=host)) for host, _ in HOSTS]
    assert found == HOSTS
    assert ask(port, "/v1/models", host="evil.example", origin="http://evil.example") == 421
    assert ask(port, "/v1/models", host="localhost", origin="http://evil.example") == 403


def test_with_a_key_any_name_will_do(serve: Any) -> None:
    port = serve(SECRET)
    assert ask(port, "/v1/models", host="demo-serve.team.svc", authorization=f"Bearer {KEY}") == 503


def test_a_server_that_was_asked_to_stop_says_so_at_once(serve: Any) -> None:
    asked = threading.Event()
    port = serve(SECRET, stopping=asked.is_set)
    for wanted in ("starting", "stopping"):
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False)
        assert (answer.status_code, answer.json()) == (503, {"status": wanted})
        asked.set()
