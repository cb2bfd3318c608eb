"""Spares on real nodes: they take the places of deleted pods, that of worker 0 too, and are replaced meanwhile.

Prints the seconds from the failure to the first reported progress of the next attempt.
"""

import datetime
import json

import pytest
from cluster.jobs import SAVE_INTERVAL, E2eJob, lasting, space, volume
from cluster.runtime import Cluster

from megatronapp_common.names import CHECKPOINT_TRACKER, LABEL_ATTEMPT, LABEL_REPLICA_INDEX, LABEL_SPARE

pytestmark = pytest.mark.timeout(3600)
NAME = "spared"


def test_spares_take_the_places_of_deleted_pods(cluster: Cluster, release: str) -> None:
    with space(cluster, NAME) as namespace:
        folder = volume(cluster, namespace, NAME)
        try:
            manifest = lasting(NAME, NAME)
            manifest["spec"]["runPolicy"] |= {"restart": "InPlace", "spares": 1}
            job = E2eJob(cluster, namespace, manifest)
            tracker = folder / "checkpoints" / CHECKPOINT_TRACKER
            job.wait(lambda: tracker.exists() and job.iteration(0) > 0, "a checkpoint")
            for attempt, worker in ((1, 1), (2, 0)):
                takes_place(job, attempt, worker)
            spent = job.status()["timeSpent"]
            print("time spent:", json.dumps(spent))
            assert spent["spareSeconds"] > 0
        finally:
            cluster.kubectl("delete", "persistentvolume", NAME, "--wait=false")


def takes_place(job: E2eJob, attempt: int, worker: int) -> None:
    """Delete the pod of a worker, and check that the spare trains in its place while the other pod stays."""
    job.wait(lambda: spares_wait(job), "a spare waits")
    before = places(job)
    waiting = before.pop("spare")
    lost, stays = before.pop(str(worker)), before
    job.cluster.kubectl("delete", "pod", lost, "-n", job.namespace, "--wait=false")
    job.wait_for_progress(attempt, SAVE_INTERVAL, f"as attempt {attempt}")
    status, now = job.status(), places(job)
    assert now[str(worker)] == waiting, "the spare has the place"
    assert stays.items() <= now.items(), "the other worker has its pod"
    assert {"worker": worker, "pod": waiting} in status["takeovers"]
    attempts = {pod["metadata"]["labels"][LABEL_ATTEMPT] for pod in job.pods() if not is_spare(pod)}
    assert attempts == {str(attempt)}
    failure = status["failures"][-1]
    assert failure["worker"] == worker
    took = seconds(status["progressTime"]) - seconds(failure["time"])
    print(f"\na spare has the place of worker {worker}, with progress {took:.1f} s after the failure or before")
    assert job.events()["SpareTookOver"].startswith(f"spare {waiting} ")
    job.wait(lambda: places(job).get("spare") not in {None, waiting}, "another spare is created")


def spares_wait(job: E2eJob) -> bool:
    conditions = {entry["type"]: entry["status"] for entry in job.status().get("conditions", ())}
    return conditions.get("SparesReady") == "True" and "spare" in places(job)


def places(job: E2eJob) -> dict[str, str]:
    """Return the pods by the index of their worker; that of the spare under "spare"."""
    found = [pod["metadata"] for pod in job.pods() if "deletionTimestamp" not in pod["metadata"]]
    return {
        "spare" if LABEL_SPARE in pod["labels"] else pod["labels"][LABEL_REPLICA_INDEX]: pod["name"] for pod in found
    }


def is_spare(pod: dict[str, dict[str, dict[str, str]]]) -> bool:
    return LABEL_SPARE in pod["metadata"]["labels"]


def seconds(text: str) -> float:
    """Return a time of RFC 3339 in seconds since the epoch."""
    return datetime.datetime.fromisoformat(text).timestamp()
