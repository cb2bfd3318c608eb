"""The example of MegaFBD with separate forward workers on real nodes: pods by role, ranks in the status, its end."""

from collections.abc import Iterator

import pytest
from cluster.jobs import LONG_S, E2eJob, example, space
from cluster.runtime import Cluster

pytestmark = pytest.mark.timeout(3600)  # the first test brings the cluster up


@pytest.fixture(scope="module")
def job(cluster: Cluster, release: str) -> Iterator[E2eJob]:
    with space(cluster, "fbd") as namespace:
        yield E2eJob(cluster, namespace, example("fbd-cluster"))


def test_the_status_has_the_ranks_of_both_roles(job: E2eJob) -> None:
    job.wait(lambda: job.status().get("rankTable"), "a rank table", 2 * LONG_S)
    status = job.status()
    assert (status["worldSize"], status["dataParallelSize"]) == (3, 2)
    assert status["fbd"] == {"forwardRanks": 1, "backwardRanks": 2, "backwardPerForward": 2}
    workers = {worker["index"]: (worker["ranks"], worker["roles"]) for worker in status["rankTable"]["workers"]}
    assert workers == {0: ([0, 1], ["backward", "backward"]), 1: ([2], ["forward"])}


def test_each_role_has_pods_of_its_own_and_forward_workers_have_no_gpu(job: E2eJob) -> None:
    pods = job.pods()
    assert [pod["metadata"]["labels"]["megatronapp.io/role"] for pod in pods] == ["backward", "forward"]
    trainers = [next(box for box in pod["spec"]["containers"] if box["name"] == "trainer") for pod in pods]
    assert [box["resources"]["limits"] for box in trainers] == [{"memory": "12Gi"}, {"memory": "6Gi"}]
    visible = [entry.get("value", "") for entry in trainers[1]["env"] if entry["name"] == "CUDA_VISIBLE_DEVICES"]
    assert visible == [""]


def test_it_trains_to_its_end_with_shipments_between_pods(job: E2eJob) -> None:
    job.wait(lambda: job.status().get("phase") == "Succeeded", "the end", 2 * LONG_S)
    job.wait(lambda: job.status()["progress"]["iteration"] == 60, "the progress of the last step, which a poll brings")
    progress = job.status()["progress"]
    assert progress["totalIterations"] == 60
    state = progress["forwardBackward"]
    assert (state["ship"], state["backwardPerForward"]) == ("saved", 2)
    view = job.hub("/api/v1/forward-backward")
    assert [role["role"] for role in view["roles"]] == ["forward", "backward"]
    shipped = {(pair["source"], pair["destination"]): pair["path"] for pair in view["transfers"]}
    assert shipped == {(2, 0): "ucx", (2, 1): "ucx"}
