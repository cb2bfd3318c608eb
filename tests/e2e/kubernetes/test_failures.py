"""Failures of a running gang on real nodes, one after the other: it continues each time, and so does the loss.

One job lives through all tests: its initializer has prepared text on a volume, and its checkpoints lie there, too.
"""

import json
import pathlib
import statistics
from collections.abc import Iterator

import pytest
from cluster import chart, node
from cluster.images import OURS
from cluster.images import name as name_of_image
from cluster.jobs import KILL_RANK, SAVE_INTERVAL, E2eJob, lasting, space, volume
from cluster.runtime import Cluster

pytestmark = pytest.mark.timeout(3600)
NAME = "kept"
NEXT = "next"
"""Tag of the images of a later release, which are the same."""


@pytest.fixture(scope="module")
def job(cluster: Cluster, release: str) -> Iterator[E2eJob]:
    with space(cluster, NAME) as namespace:
        volume(cluster, namespace, NAME)
        yield E2eJob(cluster, namespace, lasting(NAME, NAME))
    cluster.kubectl("delete", "persistentvolume", NAME, "--wait=false")


def folder(cluster: Cluster) -> pathlib.Path:
    """The volume, as this machine sees it."""
    return cluster.layout.folder / "volumes" / NAME


def continues_from(job: E2eJob, attempt: int, first: int) -> None:
    """An attempt began with this step or a later one, and its loss is where that of the one before was."""
    job.wait_for_progress(attempt, first + 20, f"as attempt {attempt}")
    losses = job.losses()
    before, after = losses[attempt - 1], losses[attempt]
    assert min(after) >= first
    assert min(after) <= max(before) + 1, "no step is left out"
    again = before.keys() & after.keys()
    assert [after[step] for step in sorted(again)] == pytest.approx([before[step] for step in sorted(again)], rel=1e-5)
    left = in_order({step: loss for step, loss in before.items() if step < min(after)})
    began, was, became = map(statistics.mean, (in_order(losses[0])[:10], left[-10:], in_order(after)[:10]))
    assert abs(became - was) < 0.25 * (began - became), (began, was, became)


def in_order(losses: dict[int, float]) -> list[float]:
    return [losses[step] for step in sorted(losses)]


def test_trains_on_text_that_its_initializer_prepared(cluster: Cluster, job: E2eJob) -> None:
    job.wait_for_progress(0, 3 * SAVE_INTERVAL // 2, "at all")
    assert (folder(cluster) / "corpus_text_document.bin").stat().st_size > 0
    assert job.status()["initialized"] is True
    losses = in_order(job.losses()[0])
    assert losses[-1] < losses[0] - 0.5


def test_killed_rank(cluster: Cluster, job: E2eJob) -> None:
    attempt = job.attempt
    cluster.kubectl("exec", f"{NAME}-worker-1", "-c", "trainer", "-n", job.namespace, "--", "python", "-c", KILL_RANK)
    continues_from(job, attempt + 1, SAVE_INTERVAL)
    status = job.status()
    assert (status["failures"][-1]["worker"], status["failures"][-1]["reason"]) == (1, "RankKilled")
    assert status["restartsTowardsMax"] == 1
    assert min(job.losses()[attempt + 1]) % SAVE_INTERVAL == 0


def test_eviction_saves_first(cluster: Cluster, job: E2eJob) -> None:
    attempt, reached = job.attempt, max(job.losses()[job.attempt])
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": f"{NAME}-worker-0"}}
    path = f"/api/v1/namespaces/{job.namespace}/pods/{NAME}-worker-0/eviction"
    cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    continues_from(job, attempt + 1, reached)
    assert job.status()["restartsTowardsMax"] == 1, "an eviction is nobody's fault"


def test_upgrade_touches_no_live_attempt(cluster: Cluster, job: E2eJob) -> None:
    for member in cluster.layout.nodes:
        for part in OURS:
            old = f"docker.io/library/{name_of_image(part)}"
            new = f"docker.io/library/megatronapp-{part}:{NEXT}"
            cluster.inside(*member.runtime("images", "tag", "--force", old, new))
    attempt, reached, uids = job.attempt, job.iteration(0), job.uids()
    chart.install(cluster, "--set", f"images.tag={NEXT}")
    pods = cluster.get("pods", "-n", chart.HOME)["items"]
    images = {container["image"] for pod in pods for container in pod["spec"]["containers"] if not is_going(pod)}
    assert images == {f"megatronapp-operator:{NEXT}"}
    job.wait_for_progress(attempt, reached + 20, "under the new operator")
    assert (job.attempt, job.uids()) == (attempt, uids)
    assert trainer_images(job) == {name_of_image("trainer")}


def is_going(pod: dict[str, object]) -> bool:
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    return "deletionTimestamp" in metadata


def trainer_images(job: E2eJob) -> set[str]:
    return {
        container["image"]
        for pod in job.pods()
        for container in pod["spec"]["containers"]
        if container["name"] == "trainer"
    }


def test_deleted_pod(cluster: Cluster, job: E2eJob) -> None:
    attempt, reached = job.attempt, max(job.losses()[job.attempt])
    cluster.kubectl("delete", "pod", f"{NAME}-worker-1", "-n", job.namespace, "--wait=false")
    continues_from(job, attempt + 1, reached)
    assert len(job.pods()) == 2
    assert trainer_images(job) == {f"megatronapp-trainer:{NEXT}"}, "a new attempt is the new operator's"


def test_stopped_kubelet(cluster: Cluster, job: E2eJob) -> None:
    attempt, reached, uids = job.attempt, job.iteration(0), job.uids()
    restarts = job.status()["restartsTowardsMax"]
    lost = job.pods()[1]["spec"]["nodeName"]
    member = next(node for node in cluster.layout.nodes if node.name == lost)
    node.stop_kubelet(member)
    try:
        job.wait_for_progress(attempt + 1, reached + 20, f"without {lost}")
        status = job.status()
        assert (status["failures"][-1]["node"], status["failures"][-1]["reason"]) == (lost, "LostNode")
        assert status["restartsTowardsMax"] == restarts, "a lost node is nobody's fault"
        assert lost not in {item["spec"]["nodeName"] for item in job.pods()}
    finally:
        node.start_kubelet(cluster.layout, member, cluster.programs)
    cluster.wait(cluster.ready, "all nodes Ready again")
    cluster.wait(lambda: not uids & node.running_pods(member), "what the node still ran ends")
    attempt, reached = job.attempt, job.iteration(0)
    job.wait_for_progress(attempt, reached + 20, f"beside {lost}")
    assert job.attempt == attempt
