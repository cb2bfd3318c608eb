"""Log of a pod that is followed while its connections end, its node rotates it, and the API server fails."""

import copy
import dataclasses
import datetime
import io
from typing import Any, cast

import pytest
from rule_example import BASE
from urllib3.exceptions import ProtocolError

from megatronapp_operator.backends.kubernetes.client.errors import NotFoundError, ThrottledError, UnavailableError
from megatronapp_operator.cli.cluster import logs
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob
from megatronapp_operator.cli.cluster.logs import WorkerLog

BEGIN = datetime.datetime(2026, 3, 1, 11, 59, 58, tzinfo=datetime.UTC)
SINCE = "sinceTime"


@dataclasses.dataclass
class Connection:
    """An answer to a request for the log, with the number of lines at that time, and the state of the pod after it."""

    lines: int
    ends: str = "closed"
    """`closed`, `broken`, or `refused` (the request itself fails)."""
    first: int = 0
    """Line with which the newest file of the log begins."""
    unfinished: int = 0
    """Characters of the next line that were written."""
    state: str = "running"
    uid: str = "p"


class BrokenAnswer(io.BytesIO):
    """Answer whose connection breaks after its content."""

    def read1(self, size: int | None = -1, /) -> bytes:
        found = super().read1(-1 if size is None else size)
        if not found:
            raise ProtocolError("Connection broken")
        return found


class NodeOfPod:
    """A cluster with a pod; five lines a second are written, the last two of each at the same time."""

    def __init__(self, *connections: Connection, views: int = 100) -> None:
        self.client = self
        self.connections = list(connections)
        self.last = Connection(0)
        self.queries: list[dict[str, str]] = []
        self.views = views
        self.failures: list[Exception] = []

    def get(self, _resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        if self.last.state == "deleted":
            return None
        status = {"containerStatuses": [{"name": "trainer", "state": {self.last.state: {"at": 1}}}]}
        return {"metadata": {"namespace": namespace, "name": name, "uid": self.last.uid}, "status": status}

    def open(self, _path: str, query: dict[str, str]) -> io.BytesIO:
        now = self.connections[0]
        if now.ends == "refused":
            self.connections.pop(0)
            raise UnavailableError("GET log: 502", status=502)
        if "timestamps" not in query:  # what there is before the log is followed
            return io.BytesIO("".join(f"{number}\n" for number in range(now.first, now.lines)).encode())
        self.last = self.connections.pop(0)
        self.queries.append(query)
        since = datetime.datetime.fromisoformat(query[SINCE]) if SINCE in query else BEGIN
        rows = [row for number in range(now.first, now.lines) if (row := line(number)) and when(number)[0] >= since]
        text = "".join(f"{row}\n" for row in rows) + line(now.lines)[: now.unfinished]
        return (BrokenAnswer if now.ends == "broken" else io.BytesIO)(text.encode())

    def view(self, _name: str) -> ClusterJob:
        if self.failures:
            raise self.failures.pop(0)
        self.views -= 1
        return job("Running" if self.views > 0 else "Failed")

    def log(self, *, attempt: int | None = None, warnings: list[str] | None = None) -> WorkerLog:
        report = list[str]().append if warnings is None else warnings.append
        return WorkerLog(cast(Cluster, self), job("Running"), worker=0, rank=None, attempt=attempt, report=report)


def job(phase: str) -> ClusterJob:
    document = copy.deepcopy(BASE)
    document["metadata"] |= {"namespace": "team", "uid": "u"}
    return ClusterJob(document | {"status": {"phase": phase}})


def when(number: int) -> tuple[datetime.datetime, int]:
    """Return second and nanosecond of a line; of five in a second the last two have the same."""
    second, place = divmod(number, 5)
    return BEGIN + datetime.timedelta(seconds=second), 1000 + min(place, 3)


def line(number: int) -> str:
    second, nanosecond = when(number)
    return f"{second:%Y-%m-%dT%H:%M:%S}.{nanosecond:09}Z {number}"


def numbers(until: int, first: int = 0) -> list[str]:
    return [str(number) for number in range(first, until)]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.0)


@pytest.mark.parametrize("attempt", [None, 0])
@pytest.mark.parametrize("ends", ["closed", "broken"])
@pytest.mark.parametrize("lines", range(11))
def test_a_log_continues_where_its_connection_ended(ends: str, attempt: int | None, lines: int) -> None:
    """Without a loss and without repetition, wherever that was within a second."""
    rest = [Connection(12, "refused"), Connection(12, ends), Connection(14, "closed", state="terminated")]
    node = NodeOfPod(Connection(lines, ends), *rest, Connection(15, state="terminated"), views=5)
    assert list(node.log(attempt=attempt).following())[:15] == numbers(15)
    assert ["follow" in query for query in node.queries] == [True, True, True, False]


def test_a_rotated_log_continues() -> None:
    node = NodeOfPod(Connection(9), Connection(13, first=8, state="terminated"), Connection(14, first=12))
    assert list(node.log(attempt=0).following()) == numbers(14)


@pytest.mark.parametrize("ends", ["closed", "broken"])
def test_a_line_that_is_half_written_is_read_once(ends: str) -> None:
    stamp = len(line(4)) - 1
    first = Connection(4, ends, unfinished=stamp)
    node = NodeOfPod(first, Connection(6, state="terminated"), Connection(6, unfinished=stamp + 1))
    assert list(node.log(attempt=0).following()) == numbers(7)


@pytest.mark.parametrize("ends", ["closed", "broken"])
def test_the_end_of_a_log_is_followed_over_connections(ends: str) -> None:
    node = NodeOfPod(Connection(8, ends), Connection(11, state="terminated"), Connection(11))
    assert list(node.log(attempt=0).following(tail=2)) == numbers(11, 6)


def test_a_pod_that_was_replaced_is_not_read_as_its_predecessor() -> None:
    node = NodeOfPod(Connection(3, state="running", uid="q"), Connection(5, uid="q", state="terminated"))
    node.last = Connection(0, uid="p")
    assert list(node.log(attempt=0).following()) == numbers(3)
    assert len(node.connections) == 1


@pytest.mark.parametrize("state", ["deleted", "running"])
def test_a_log_ends_with_its_pod_or_its_job(state: str) -> None:
    """Also where a node is lost and the pod never ends."""
    ends = [Connection(3, "broken", state=state), Connection(4, "broken", state=state)]
    node = NodeOfPod(*ends, views=1)
    assert list(node.log(attempt=0).following()) == numbers(3 if state == "deleted" else 4)


def test_the_first_request_for_a_selected_attempt_must_succeed() -> None:
    with pytest.raises(UnavailableError, match="502"):
        list(NodeOfPod(Connection(0, "refused")).log(attempt=0).following())


def test_an_outage_of_the_api_server_is_reported_once() -> None:
    node = NodeOfPod(Connection(3), Connection(5), Connection(7, state="terminated"), Connection(7), views=2)
    node.failures = [UnavailableError("GET job: 503"), ThrottledError("GET job: 429")]
    warnings: list[str] = []
    assert list(node.log(warnings=warnings).following()) == numbers(7)
    assert warnings == ["GET job: 503; trying again"]


def test_an_outage_after_the_end_of_a_pod_is_reported() -> None:
    node = NodeOfPod(Connection(3, state="terminated"), Connection(3, state="terminated"), views=1)
    node.failures = [UnavailableError("GET job: 503")]
    warnings: list[str] = []
    assert list(node.log(warnings=warnings).following()) == numbers(3)
    assert warnings == ["GET job: 503; trying again"]


def test_a_log_that_was_deleted_with_its_pod_has_no_more_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeOfPod(Connection(3, state="terminated"), views=1)
    answer = node.open

    def once(path: str, query: dict[str, str]) -> io.BytesIO:
        if not node.connections:
            raise NotFoundError("pods not found", status=404)
        return answer(path, query)

    monkeypatch.setattr(node, "open", once)
    assert list(node.log().following()) == numbers(3)
