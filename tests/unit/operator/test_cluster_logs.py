"""Pod whose log is read for a worker."""

from typing import Any, cast

import pytest

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
