"""Hub by a foreign author: it gets nothing of the caller through the gateway, and gives nothing but JSON."""

import contextlib
import pathlib
import re
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import gateway
import hostile_hub
import httpx
import kube
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from megatronapp_common import frames
from megatronapp_common.frames import FrameType
from megatronapp_common.scope.protocol import SUBPROTOCOL
from megatronapp_common.web.tokens import TokenRole
from megatronapp_operator.gateway.gateway import BODY_S, CALLERS_LONG_BODIES
from megatronapp_operator.gateway.websocket_admission import CALLERS_SOCKETS

NO_NAME = re.compile("viewer-[0-9a-f]{16}")
PASSED = {"content-type", "transfer-encoding", "date", "content-length"}
OURS = {
    "content-security-policy",
    "x-content-type-options",
    "referrer-policy",
    "cross-origin-opener-policy",
    "cross-origin-resource-policy",
    "cache-control",
}


@pytest.fixture
def job(plane: kube.ControlPlane, namespace: str) -> gateway.GatewayJob:
    return gateway.make_job(plane, namespace, "bad")


@pytest.fixture
def hub(
    job: gateway.GatewayJob, reviewing: gateway.Gateway, victim: hostile_hub.HostileHub
) -> Iterator[hostile_hub.HostileHub]:
    """The bad job's hub, whose redirects lead to the victim."""
    with hostile_hub.hostile_hub(job.address, reviewing.hub_port, victim=victim) as running:
        yield running


@pytest.fixture
def victim(plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway) -> Iterator[hostile_hub.HostileHub]:
    """Start another server within reach of the gateway, which must not receive a request."""
    good = gateway.make_job(plane, namespace, "good")
    with hostile_hub.hostile_hub(good.address, reviewing.hub_port) as running:
        yield running


@pytest.fixture
def token(plane: kube.ControlPlane, namespace: str) -> str:
    return gateway.account(plane, namespace, "alice", grants=[gateway.on_jobs("get", "list", "update")])


def test_what_is_not_json_of_a_sane_size_stays_outside(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    wrong = ("html", "script", "nothing", "redirect", "json-redirect", "login", "packed", "endless")
    for what in wrong:
        with reviewing.client(token) as client:
            answer = client.get(f"{job.path}/job", params={"do": what})
        assert (answer.status_code, answer.json()["code"]) == (502, "bad-hub"), what
        assert "script" not in answer.text
        assert set(answer.headers) <= PASSED | OURS
    assert len(hub.requests) == len(wrong)
    assert not hub.redirect_was_followed


def test_json_is_forwarded_with_its_type_and_without_headers(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    """HTML that calls itself JSON is shown as text: its type is the gateway's, and no browser may guess another."""
    for what in ("lie", "fine"):
        with reviewing.client(token) as client:
            answer = client.get(f"{job.path}/job", params={"do": what})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'; sandbox"
        assert set(answer.headers) <= PASSED | OURS
    assert len(hub.requests) == 2


def test_an_answer_that_breaks_off_is_no_whole_answer(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    with reviewing.client(token) as client, pytest.raises(httpx.RemoteProtocolError):
        client.get(f"{job.path}/job", params={"do": "cut"})
    assert len(hub.requests) == 1


def test_a_hub_receives_its_own_token_and_no_header_of_the_caller(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    more = {"X-Forwarded-For": "10.1.2.3", "X-Secret": "s", "Origin": reviewing.url, "Referer": reviewing.url}
    more["X-Megatronapp-Caller"] = "root"
    with reviewing.client() as browser:
        browser.post("/login", data={"token": token})
        cookie = next(iter(browser.cookies.values()))
        browser.get(f"{job.path}/job", params={"token": token, "a": "1"}, headers=more)
        browser.post(f"{job.path}/faults", json={"rank": 0}, headers=more)
        browser.delete(f"{job.path}/faults/one", headers=more)
    assert [request.path for request in hub.requests] == ["/api/v1/job?a=1", "/api/v1/faults", "/api/v1/faults/one"]
    for request, role in zip(hub.requests, (TokenRole.VIEWER, TokenRole.CONTROLLER, TokenRole.CONTROLLER), strict=True):
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert headers.pop("authorization") == f"Bearer {reviewing.job_token(job.uid, role)}"
        caller = headers.pop("x-megatronapp-caller")
        controls = role is TokenRole.CONTROLLER
        assert caller == f"system:serviceaccount:{job.namespace}:alice" if controls else NO_NAME.fullmatch(caller)
        assert set(headers) <= {"host", "accept", "accept-encoding", "user-agent", "content-type", "content-length"}
        assert not any(token in value or cookie in value for value in headers.values())


def test_paths_cannot_leave_the_hub_or_reach_another(
    job: gateway.GatewayJob,
    hub: hostile_hub.HostileHub,
    reviewing: gateway.Gateway,
    token: str,
) -> None:
    with reviewing.client(token) as client:
        for path in (
            "..%2f..%2fmetrics",
            "%2e%2e/%2e%2e/metrics",
            "a%2f..%2f..%2fb",
            "/@127.0.0.1:1/",
            "job%0d%0aX-Evil:%201",
            "job%3Fa=1%23b",
            "%00",
        ):
            answer = client.get(f"{job.path}/{path}")
            assert answer.status_code in {404, 422}, (path, answer.text)
    assert hub.requests == []
    assert not hub.redirect_was_followed


RUN = "scope/runs/0123456789ab"
TILE, TABLE, SESSION = f"{RUN}/attention/0/1/2/0/0/0", f"{RUN}/values/q", f"{RUN}/session"


WRONG = [
    *((TILE, what) for what in ("html", "script", "redirect", "login", "table", "large-tile", "unchanged", "broken")),
    *((SESSION, what) for what in ("html", "script", "packed", "table")),
    *((f"{TABLE}?format=csv", what) for what in ("html", "tile")),
    *((f"{TABLE}?format=html", what) for what in ("html", "tile", "table")),
    *((path, "tile") for path in ("scope/runs", RUN, "job", f"{RUN}/values/q/session")),
]


def test_binary_answers_are_accepted_from_their_own_paths_only(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    with reviewing.client(token) as client:
        for path, what in WRONG:
            answer = client.get(f"{job.path}/{path}{'&' if '?' in path else '?'}do={what}")
            assert (answer.status_code, answer.json()["code"]) == (502, "bad-hub"), (path, what)
            assert set(answer.headers) <= PASSED | OURS
    assert len(hub.requests) == len(WRONG) and not hub.redirect_was_followed


def test_well_formed_headers_of_a_hub_are_forwarded(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    with reviewing.client(token) as client:
        tile = client.get(f"{job.path}/{TILE}", params={"do": "tile"})
        odd = client.get(f"{job.path}/{TILE}", params={"do": "odd-tile"})
        same = client.get(f"{job.path}/{TILE}", params={"do": "unchanged"}, headers={"If-None-Match": '"a"'})
        client.get(f"{job.path}/{TILE}", params={"do": "tile"}, headers={"If-None-Match": "x" * 100})
        table = client.get(f"{job.path}/{TABLE}", params={"do": "table", "format": "csv"})
        busy = client.get(f"{job.path}/{RUN}", params={"do": "busy"})
    assert (tile.content, tile.headers["etag"], tile.headers["x-tile-shape"]) == (b"\x00\xff", '"a"', "1,2")
    assert tile.headers["cache-control"] == "private, no-cache"
    assert set(tile.headers) <= PASSED | OURS | {"etag", "x-tile-shape"}
    assert set(odd.headers) <= PASSED | OURS and odd.headers["cache-control"] == "no-store"
    assert (same.status_code, same.content) == (304, b"")
    assert [request.headers.get("If-None-Match") for request in hub.requests[:4]] == [None, None, '"a"', None]
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    assert table.headers["content-disposition"] == 'attachment; filename="0123456789ab-q.csv"'
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")
    for answer in (tile, odd, same, table, busy):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in answer.headers["content-security-policy"]


@contextlib.contextmanager
def scope(reviewing: gateway.Gateway, job: gateway.GatewayJob, token: str) -> Iterator[ClientConnection]:
    url = f"{reviewing.url.replace('http', 'ws', 1)}{job.path}/scope"
    how = {"proxy": None, "compression": None, "max_size": None, "max_queue": 1, "close_timeout": 0.2}
    how["open_timeout"] = gateway.DEADLINE_S
    headers = {"Authorization": f"Bearer {token}"}
    with connect(url, additional_headers=headers, subprotocols=[Subprotocol(SUBPROTOCOL)], **how) as page:  # type: ignore[arg-type]
        yield page


def end_of(page: ClientConnection) -> bytes | str:
    """Return what a page receives: its first frame, the code of an error, or why the socket was closed."""
    try:
        message = page.recv(gateway.DEADLINE_S, decode=False)
    except ConnectionClosed as closed:
        return "" if closed.rcvd is None else closed.rcvd.reason
    found = frames.decode(message)
    return str(found.header["code"]) if found.type == FrameType.ERROR else message


def test_only_protocol_frames_pass_the_scope_socket(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    for how, protocol, received in (
        ("redirect", SUBPROTOCOL, "hub-not-there"),
        ("html", SUBPROTOCOL, "hub-not-there"),
        ("largest", None, "bad-hub"),
        ("largest", "megatronapp.scope.2", "bad-hub"),
        ("text", SUBPROTOCOL, "the hub sent text"),
        ("long-step", SUBPROTOCOL, "the hub sent a frame of more than 262144 bytes"),
        ("big", SUBPROTOCOL, "the hub has ended the connection"),
        ("largest", SUBPROTOCOL, hostile_hub.FRAMES["largest"]),
        ("long-run", SUBPROTOCOL, hostile_hub.FRAMES["long-run"]),
    ):
        hub.live, hub.protocol = how, protocol
        hub.requests.clear()
        with scope(reviewing, job, token) as page:
            assert end_of(page) == received, how
        headers_sent = {name.lower(): value for name, value in hub.requests[0].headers.items()}
        assert headers_sent["authorization"] == f"Bearer {reviewing.job_token(job.uid, TokenRole.CONTROLLER)}"
        assert headers_sent["sec-websocket-protocol"] == SUBPROTOCOL and "sec-websocket-extensions" not in headers_sent
    assert not hub.redirect_was_followed


def test_a_page_that_stops_reading_buffers_little_and_slows_no_other(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    hub.live, hub.protocol, hub.flood = "flood", SUBPROTOCOL, hostile_hub.FRAMES["largest"]
    with scope(reviewing, job, token), scope(reviewing, job, token) as reader:
        got = sum(len(reader.recv(gateway.DEADLINE_S, decode=False)) for _ in range(64))
        gateway.wait_for(lambda: len(hub.sent) == 2 and max(hub.sent.values()) >= got)  # counted after it is sent
        stalled, read = sorted(hub.sent.values())
    assert got == 64 * len(hub.flood)
    assert read >= got
    assert stalled <= 32 * len(hub.flood), "what kernels and gateway hold of a page, whatever its hub sends"


@pytest.mark.parametrize("how", ["redirect", "html", "text", "frames", "big"])
def test_only_binary_frames_pass_the_live_socket(
    job: gateway.GatewayJob,
    hub: hostile_hub.HostileHub,
    reviewing: gateway.Gateway,
    token: str,
    how: str,
) -> None:
    hub.live = how
    url = f"{reviewing.url.replace('http', 'ws', 1)}{job.path}/live"
    headers = {"Authorization": f"Bearer {token}", "Cookie": "a=b"}
    with connect(
        url, additional_headers=headers, proxy=None, compression=None, open_timeout=gateway.DEADLINE_S
    ) as page:
        with contextlib.suppress(ConnectionClosed):  # the hub may have been quicker
            page.send("a page has nothing to say")
        if how == "frames":
            assert page.recv(gateway.DEADLINE_S) == b"frame"
        elif how == "big":
            with pytest.raises(ConnectionClosed, match="the hub has ended the connection"):
                page.recv(gateway.DEADLINE_S)
        elif how == "text":
            with pytest.raises(ConnectionClosed, match="the hub sent text"):
                page.recv(gateway.DEADLINE_S)
        else:
            message = page.recv(gateway.DEADLINE_S)
            assert isinstance(message, bytes)
            assert frames.decode(message).header["code"] == "hub-not-there"
    [request] = hub.requests
    assert request.headers["Authorization"] == f"Bearer {reviewing.job_token(job.uid)}"
    assert not any(token in value or "a=b" in value for value in request.headers.values())
    assert not hub.redirect_was_followed


def test_live_sockets_of_a_caller_are_limited(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    url = f"{reviewing.url.replace('http', 'ws', 1)}{job.path}/live"
    headers = {"Authorization": f"Bearer {token}"}
    with contextlib.ExitStack() as stack:

        def first_frame() -> bytes:
            options: dict[str, Any] = {"proxy": None, "compression": None, "open_timeout": gateway.DEADLINE_S}
            page = stack.enter_context(connect(url, additional_headers=headers, **options))
            return bytes(page.recv(gateway.DEADLINE_S, decode=False))

        assert [first_frame() for _ in range(CALLERS_SOCKETS)] == [b"frame"] * CALLERS_SOCKETS
        assert frames.decode(first_frame()).header["code"] == "too-many"
    assert len(hub.requests) == CALLERS_SOCKETS


def test_only_a_few_incomplete_bodies_are_waited_for(
    job: gateway.GatewayJob, hub: hostile_hub.HostileHub, reviewing: gateway.Gateway, token: str
) -> None:
    place = urllib.parse.urlsplit(reviewing.url)
    head = f"POST {job.path}/scope/runs HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {token}\r\n"
    head += "Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def code() -> bytes:
            """100: the gateway waits for the body, for BODY_S."""
            peer = stack.enter_context(socket.create_connection((place.hostname, place.port), gateway.DEADLINE_S))
            peer.sendall(head.encode())
            return peer.recv(1 << 16).split()[1]

        began, codes = time.monotonic(), [code() for _ in range(CALLERS_LONG_BODIES)]
        assert codes == [b"100"] * CALLERS_LONG_BODIES
        while code() != b"429":
            assert time.monotonic() - began >= BODY_S, "after that the first body is given up"
    assert not hub.requests


def test_no_token_is_ever_written_down(reviewing: gateway.Gateway, job: gateway.GatewayJob, token: str) -> None:
    with reviewing.client(token) as client:
        client.get(f"{job.path}/job", params={"token": token})
    url = f"{reviewing.url.replace('http', 'ws', 1)}{job.path}/live?token={token}"
    with pytest.raises(InvalidStatus), connect(url, proxy=None, open_timeout=gateway.DEADLINE_S):
        pass
    log = pathlib.Path(reviewing.log).read_text(encoding="utf-8")
    assert token not in log
    assert reviewing.job_token(job.uid) not in log
    assert reviewing.key not in log
