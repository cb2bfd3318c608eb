"""The HTTP endpoint of worker 0, over real sockets."""

import http.client
import json
import math
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from megatronapp_trainer.errors import RendezvousError
from megatronapp_trainer.launch.rendezvous.gang_status import GangPhase, GangStatus
from megatronapp_trainer.launch.rendezvous.messages import JoinRequest
from megatronapp_trainer.launch.rendezvous.rank_table import build_table
from megatronapp_trainer.launch.reporting import status_server
from megatronapp_trainer.launch.reporting.status_server import PATH, serve_status

TOKEN = "ab" * 32
HOST = "127.0.0.2"


@pytest.fixture
def gang_status() -> GangStatus:
    return GangStatus(3)


@pytest.fixture
def port(gang_status: GangStatus) -> Iterator[int]:
    with serve_status(gang_status, token=TOKEN, address=HOST, port=0) as port:
        yield port


def request_status(
    port: int, path: str = PATH, authorization: str | None = f"Bearer {TOKEN}", method: str = "GET"
) -> Any:
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    connection.request(method, path, headers={} if authorization is None else {"Authorization": authorization})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_worker_0_serves_its_status(gang_status: GangStatus, port: int) -> None:
    gang_status.missing = [2]
    status, headers, body = request_status(port)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == {
        "attempt": 3,
        "phase": "Gathering",
        "missing": [2],
        "ends": [],
        "rankTable": None,
        "progress": None,
    }
    join = JoinRequest(uid="u", attempt=3, index=0, address="10.0.0.1", node="n", num_ranks=2, port=1)
    gang_status.table, gang_status.phase, gang_status.missing = build_table([join]), GangPhase.RUNNING, []
    gang_status.progress = {
        "iteration": 7,
        "loss": math.nan,
        "gradNorm": math.inf,
        "learningRate": 0.5,
        "state": "training",
    }
    answer = json.loads(request_status(port)[2])
    assert answer["phase"] == "Running"
    assert answer["rankTable"] == gang_status.table.to_json()
    assert answer["progress"] == {
        "iteration": 7,
        "loss": None,
        "gradNorm": None,
        "learningRate": 0.5,
        "state": "training",
    }


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer " + "cd" * 32, f"Basic {TOKEN}", "Bearer \xff"])
def test_nothing_is_served_without_the_token(port: int, authorization: str | None) -> None:
    status, headers, body = request_status(port, authorization=authorization)
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert b"attempt" not in body


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("POST", PATH, 501), ("GET", PATH + "x", 404)]
)
def test_there_is_nothing_else(port: int, method: str, path: str, status: int) -> None:
    assert request_status(port, path, method=method)[0] == status


def test_silent_connections_block_no_request_and_are_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server._StatusHandler, "timeout", 120)
    silent = [socket.create_connection((HOST, port), timeout=120) for _ in range(status_server.MOST_CONNECTIONS - 2)]
    assert request_status(port)[0] == 200
    monkeypatch.setattr(status_server._StatusHandler, "timeout", 0.3)
    with socket.create_connection((HOST, port), timeout=120) as connection:
        assert connection.recv(1) == b""
    for connection in silent:
        connection.close()


def test_too_many_at_once_are_closed_unanswered(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server._StatusHandler, "timeout", 120)
    silent = [socket.create_connection((HOST, port), timeout=120) for _ in range(status_server.MOST_CONNECTIONS)]
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        request_status(port)
    for connection in silent:
        connection.close()


def test_a_port_in_use_is_named(gang_status: GangStatus, port: int) -> None:
    with pytest.raises(RendezvousError, match=rf"cannot serve its status at {HOST}:{port}: Address already in use"):
        serve_status(gang_status, token=TOKEN, address=HOST, port=port).__enter__()
