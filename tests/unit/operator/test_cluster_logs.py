"""Pod whose log is read for a worker or a rank, and the lines of an attempt in it."""

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import rendered
from rule_example import BASE

from megatronapp_common.errors import TopologyError
from megatronapp_common.names import LABEL_ATTEMPT, RankOrder
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError
from megatronapp_operator.backends.kubernetes.client.resources import CONFIG_MAPS
from megatronapp_operator.backends.kubernetes.render import gang
from megatronapp_operator.backends.kubernetes.status_writer import shortened
from megatronapp_operator.cli.cluster import logs
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob
from megatronapp_operator.cli.cluster.logs import WorkerLog
from megatronapp_operator.cli.logs import LogSelection
from megatronapp_operator.errors import OperatorError
from megatronapp_trainer.launch import worker_life
from megatronapp_trainer.launch.rendezvous.messages import JoinRequest
from megatronapp_trainer.launch.rendezvous.rank_table import build_table

ENDED = {"containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 0}}}]}


class NamedPods:
    """A cluster in which every pod exists."""

    def get(self, _resource: Any, namespace: str, name: str) -> dict[str, Any]:
        return {"metadata": {"namespace": namespace, "name": name, "labels": {}}}


@pytest.mark.parametrize(("worker", "pod"), [(1, "gpt-worker-1"), (2, "gpt-spare-0-3")])
def test_the_log_of_a_worker_is_that_of_the_former_spare_in_its_place(worker: int, pod: str) -> None:
    metadata = {"name": "gpt", "namespace": "team", "uid": "u"}
    status = {"takeovers": [{"worker": 2, "pod": "gpt-spare-0-3"}]}
    job = ClusterJob({"metadata": metadata, "spec": {}, "status": status})
    found = WorkerLog(cast(Cluster, NamedPods()), job, worker=worker, rank=None, attempt=None)
    assert found.pod()["metadata"]["name"] == pod


class TakenOver(NamedPods):
    """A cluster in which a spare takes the place of worker 1, and then the job ends; each log has the pod's name."""

    def __init__(self) -> None:
        metadata = {"name": "gpt", "namespace": "team", "uid": "u"}
        taken = [{"worker": 1, "pod": "gpt-spare-0-0"}]
        statuses: list[dict[str, Any]] = [
            {"phase": "Restarting"},
            {"phase": "Running", "takeovers": taken},
            {"phase": "Succeeded", "takeovers": taken},
        ]
        self.jobs = [ClusterJob({"metadata": metadata, "spec": {}, "status": status}) for status in statuses]
        self.client = self

    def get(self, _resource: Any, namespace: str, name: str) -> dict[str, Any]:
        return {"metadata": {"namespace": namespace, "name": name, "uid": name, "labels": {}}, "status": ENDED}

    def view(self, _name: str) -> ClusterJob:
        return self.jobs.pop(0)

    def open(self, path: str, _query: dict[str, str]) -> io.BytesIO:
        return io.BytesIO(path.split("/")[-2].encode() + b"\n")


def test_a_log_is_followed_into_the_pod_of_the_spare_that_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.0)
    cluster = TakenOver()
    log = WorkerLog(cast(Cluster, cluster), cluster.jobs[0], worker=1, rank=None, attempt=None)
    assert list(log.following()) == ["gpt-worker-1", "gpt-spare-0-0"]


class Shrinking(TakenOver):
    """A cluster whose gang of four replicas gets smaller; each pod has a line of each rank that could report."""

    def __init__(self) -> None:
        super().__init__()
        document = copy.deepcopy(BASE)
        document["spec"] |= {"nodes": 4, "procPerNode": 2, "parallelism": {"data": 4, "pipeline": 2}}
        document["spec"]["training"] |= {"globalBatchSize": 24}
        document["metadata"] |= {"namespace": "team", "uid": "u"}
        smaller = {"gangSize": {"data": 3, "sinceAttempt": 1}}
        statuses: list[dict[str, Any]] = [{}, {"phase": "Running"} | smaller, {"phase": "Succeeded"} | smaller]
        self.jobs = [ClusterJob(document | {"status": status}) for status in statuses]

    def open(self, path: str, _query: dict[str, str]) -> io.BytesIO:
        pod = path.split("/")[-2]
        return io.BytesIO("".join(f"[rank {rank}] {rank} at {pod}\n" for rank in (3, 4)).encode())


def test_the_log_of_the_reporting_rank_is_that_of_the_current_size() -> None:
    cluster = Shrinking()
    _, smaller, _ = cluster.jobs
    log = WorkerLog.of(cast(Cluster, cluster), smaller, LogSelection())
    assert list(log.lines(log.pod())) == ["3 at small-worker-1"]
    with pytest.raises(OperatorError, match="has no worker 3; take 0 to 2"):
        WorkerLog.of(cast(Cluster, cluster), smaller, LogSelection(worker=3))


def test_the_log_of_the_reporting_rank_is_followed_into_a_smaller_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.0)
    cluster = Shrinking()
    log = WorkerLog.of(cast(Cluster, cluster), cluster.jobs.pop(0), LogSelection())
    assert list(log.following()) == ["4 at small-worker-2", "3 at small-worker-1"]
    assert log.whose == "rank 3"


def table_of(nodes: int, per_node: int, *, attempt: int = 0) -> dict[str, Any]:
    """Return the launchers' table, with addresses in the reverse order of the workers' indices."""
    joins = [
        JoinRequest(
            uid="u",
            attempt=attempt,
            index=index,
            address=f"10.0.{(nodes - index) // 256}.{(nodes - index) % 256}",
            node="n",
            num_ranks=per_node,
            port=1,
        )
        for index in range(nodes)
    ]
    return build_table(joins, RankOrder.IP).to_json()


class Ordered:
    """A cluster with a job of two stages whose ranks are numbered by address, and perhaps with a long table."""

    def __init__(self, *statuses: dict[str, Any], nodes: int = 2, order: str = "IP") -> None:
        document = copy.deepcopy(BASE)
        document["spec"] |= {"nodes": nodes, "procPerNode": 2, "network": {"rankOrder": order}}
        document["spec"] |= {"parallelism": {"data": nodes, "pipeline": 2}}
        document["spec"]["training"] |= {"globalBatchSize": 8 * nodes}
        if order == "Topology":
            document["spec"]["network"] |= {"topologyKey": "zone"}
        document["metadata"] |= {"namespace": "team", "uid": "u"}
        self.jobs = [ClusterJob(document | {"status": status}) for status in statuses]
        self.tables: dict[str, dict[str, Any]] = {}
        self.client = self

    def get(self, resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        if resource is CONFIG_MAPS:
            return self.tables.get(name)
        return {"metadata": {"namespace": namespace, "name": name, "uid": name, "labels": {}}, "status": ENDED}

    def view(self, _name: str) -> ClusterJob:
        return self.jobs.pop(0)

    def open(self, path: str, _query: dict[str, str]) -> io.BytesIO:
        return io.BytesIO(f"[rank 2] at {path.split('/')[-2]}\n".encode())

    def pod_of(self, **selection: int) -> str:
        found = WorkerLog.of(cast(Cluster, self), self.jobs[0], LogSelection(**selection)).pod()
        return str(found["metadata"]["name"])


def test_the_log_of_a_rank_is_in_the_pod_that_the_launchers_gave_it() -> None:
    cluster = Ordered({"rankTable": table_of(2, 2)})
    pods = [cluster.pod_of(rank=rank) for rank in range(4)]
    assert pods == ["small-worker-1", "small-worker-1", "small-worker-0", "small-worker-0"]
    assert cluster.pod_of() == "small-worker-0"  # rank 2 reports
    assert cluster.pod_of(worker=1) == "small-worker-1"
    with pytest.raises(TopologyError, match="rank 4 is outside of this world of 4"):
        cluster.pod_of(rank=4)


def test_the_pod_of_a_rank_may_be_a_former_spare() -> None:
    taken = {"takeovers": [{"worker": 0, "pod": "small-spare-0-1"}]}
    assert Ordered({"rankTable": table_of(2, 2)} | taken).pod_of(rank=3) == "small-spare-0-1"


@pytest.mark.parametrize("largest", [None, 0], ids=["plain", "compressed"])
def test_a_long_table_is_read_from_its_config_map(largest: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if largest is not None:
        monkeypatch.setattr(gang, "RANKS_BYTES", largest)
    whole = table_of(40, 2)
    cluster = Ordered({"rankTable": shortened(whole, "small-ranks")}, nodes=40)
    with pytest.raises(OperatorError, match="which worker runs rank 79 is known once"):
        cluster.pod_of(rank=79)
    _, cluster.tables["small-ranks"] = render.ranks(rendered.owner_of(rendered.make_job()), whole)
    assert [cluster.pod_of(rank=rank) for rank in (0, 79)] == ["small-worker-39", "small-worker-0"]
    _, cluster.tables["small-ranks"] = render.ranks(rendered.owner_of(rendered.make_job()), table_of(40, 2, attempt=1))
    with pytest.raises(OperatorError, match="which worker runs rank 79 is known once"):
        cluster.pod_of(rank=79)


class WithoutConfigMaps(Ordered):
    """A cluster that lets its user read no ConfigMaps."""

    def get(self, resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        if resource is CONFIG_MAPS:
            raise ForbiddenError('configmaps "small-ranks" is forbidden', status=403)
        return super().get(resource, namespace, name)


def test_a_long_table_is_needed_only_where_ranks_are_not_numbered_by_index() -> None:
    status = {"rankTable": shortened(table_of(40, 2), "small-ranks")}
    assert WithoutConfigMaps(status, nodes=40, order="Index").pod_of(rank=79) == "small-worker-39"
    with pytest.raises(OperatorError, match=r"is forbidden; it says which worker runs rank 79.*write --worker N"):
        WithoutConfigMaps(status, nodes=40).pod_of(rank=79)


@pytest.mark.parametrize("order", ["IP", "Topology"])
def test_without_a_table_the_pod_of_a_rank_is_known_by_index_alone(order: str) -> None:
    assert Ordered({}, order="Index").pod_of(rank=3) == "small-worker-1"
    assert Ordered({}, order=order).pod_of(worker=1) == "small-worker-1"
    for selection in ({}, {"rank": 3}):
        with pytest.raises(OperatorError, match=rf"rankOrder: {order}\); try again, or .* logs small --worker 0"):
            Ordered({}, order=order).pod_of(**selection)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_rank_is_followed_once_its_worker_is_known_and_to_another_worker(
    rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.0)
    first, other = table_of(2, 2), table_of(2, 2, attempt=1)
    for worker in other["workers"]:
        worker["index"] = 1 - worker["index"]
    gathered: list[dict[str, Any]] = [{"phase": "Running", "rankTable": first}, {"phase": "Restarting"}]
    restarted = [{"phase": phase, "rankTable": other} for phase in ("Running", "Succeeded")]
    cluster = Ordered({"phase": "Starting"}, *gathered, *restarted)
    log = WorkerLog.of(cast(Cluster, cluster), cluster.jobs.pop(0), LogSelection(rank=rank))
    assert list(log.following()) == ["at small-worker-0", "at small-worker-1"]


def begun(attempt: int) -> str:
    return f"2026-01-01 00:00:00,000 INFO continuing with attempt {attempt} in place"


def taken(attempt: int) -> str:
    return f"2026-01-01 00:00:00,000 INFO taking the place of worker 1 in attempt {attempt}"


class InPlace(NamedPods):
    """A cluster with a pod that was created for one attempt and has been ordered to run later ones."""

    def __init__(self, lines: list[str], *, first: int, newest: int) -> None:
        self.client = self
        self.text = "".join(f"{line}\n" for line in lines).encode()
        job = rendered.make_job({"runPolicy": {"restart": "InPlace"}})
        self.made = rendered.make_worker(job, attempt=first)
        self.made["metadata"]["labels"][LABEL_ATTEMPT] = str(newest)
        self.made["metadata"]["uid"] = "p"
        self.made["status"] = ENDED

    def get(self, _resource: Any, _namespace: str, _name: str) -> dict[str, Any]:
        return self.made

    def view(self, _name: str) -> ClusterJob:
        raise AssertionError("an attempt that is selected is followed without the job")

    def open(self, _path: str, _query: dict[str, str]) -> io.BytesIO:
        return io.BytesIO(self.text)

    def log(self, attempt: int | None, *, rank: int | None = 0) -> WorkerLog:
        job = ClusterJob({"metadata": {"name": "gpt", "namespace": "default", "uid": "u"}, "spec": {}})
        return WorkerLog(cast(Cluster, self), job, worker=0, rank=rank, attempt=attempt)

    def lines(self, attempt: int | None, *, rank: int | None = 0) -> list[str]:
        log = self.log(attempt, rank=rank)
        return list(log.lines(log.pod()))


TWICE = ["start", "[rank 0] a", begun(1), "[rank 0] b", "[rank 1] x", begun(2), f"[rank 0] {begun(3)}", "end"]


@pytest.mark.parametrize(
    ("attempt", "of_rank", "of_launcher"),
    [
        (0, ["a"], ["start"]),
        (1, ["b"], [begun(1)]),
        (2, [begun(3)], [begun(2), "end"]),
        (None, ["a", "b", begun(3)], ["start", begun(1), begun(2), "end"]),
    ],
)
def test_attempts_restarted_in_place_are_printed_separately(
    attempt: int | None, of_rank: list[str], of_launcher: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.0)
    cluster = InPlace(TWICE, first=0, newest=2)
    assert cluster.lines(attempt) == of_rank
    assert cluster.lines(attempt, rank=None) == of_launcher
    if attempt is not None:
        assert list(cluster.log(attempt).following()) == of_rank
        assert list(cluster.log(attempt).following(tail=1)) == of_rank[-1:]


def test_an_attempt_that_is_followed_ends_where_its_successor_begins() -> None:
    cluster = InPlace(TWICE, first=0, newest=0)  # the order for another attempt arrives later
    assert list(cluster.log(0).following()) == ["a"]


@pytest.mark.parametrize(
    ("lines", "first", "newest", "attempt"),
    [
        (["[rank 0] b", begun(2), "[rank 0] c"], 0, 2, 0),  # the node has dropped the beginning
        (["[rank 0] b", begun(2), "[rank 0] c"], 0, 2, 1),
        (["[rank 0] c"], 0, 2, 2),
        (["[rank 0] a"], 0, 1, 1),  # not yet
        (["waiting", taken(1), "[rank 0] b"], 0, 1, 0),  # another pod ran the worker
    ],
)
def test_an_attempt_that_the_shared_log_lacks_is_refused(
    lines: list[str], first: int, newest: int, attempt: int
) -> None:
    cluster = InPlace(lines, first=first, newest=newest)
    shared = rf"restarted in place, and attempts {first} to {newest} share .* {attempt} does not begin.*omit --attempt"
    readers: list[Callable[[], Any]] = [
        lambda: cluster.lines(attempt),
        lambda: list(cluster.log(attempt).following()),
    ]
    for read in readers:
        with pytest.raises(OperatorError, match=shared):
            read()


def test_a_spare_has_the_attempts_since_it_took_its_place() -> None:
    assert InPlace(["waiting", taken(1), "[rank 0] b"], first=0, newest=1).lines(1) == ["b"]


def test_a_pod_has_no_log_of_earlier_and_of_future_attempts() -> None:
    with pytest.raises(OperatorError, match="is of attempt 1; the log of attempt 0 was deleted with its pod"):
        InPlace([], first=1, newest=1).lines(0)
    with pytest.raises(OperatorError, match="is of attempt 1 and later; the log of attempt 0 was deleted"):
        InPlace([], first=1, newest=2).lines(0)
    with pytest.raises(OperatorError, match="is of attempt 2; attempt 3 has not begun there"):
        InPlace([], first=1, newest=2).lines(3)


def test_the_launcher_writes_the_lines_at_which_attempts_begin() -> None:
    source = inspect.getsource(worker_life)
    assert 'log.info("continuing with attempt %d in place", order.attempt)' in source
    assert 'log.info("taking the place of worker %d in attempt %d", self._settings.index, order.attempt)' in source
