"""Pod whose log is read for a worker."""

import copy
import io
from typing import Any, cast

import pytest
from rule_example import BASE

from megatronapp_operator.cli.cluster import logs
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob
from megatronapp_operator.cli.cluster.logs import WorkerLog
from megatronapp_operator.cli.logs import LogSelection
from megatronapp_operator.errors import OperatorError


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
        return {"metadata": {"namespace": namespace, "name": name, "uid": name, "labels": {}}}

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
