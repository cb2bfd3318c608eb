"""Pod whose log is read for a worker."""

import io
from typing import Any, cast

import pytest

from megatronapp_operator.cli.cluster import logs
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob
from megatronapp_operator.cli.cluster.logs import WorkerLog


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
