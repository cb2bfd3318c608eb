"""Spares on real nodes: they take the places of deleted pods, that of worker 0 too, and of workers on a slow node.

Prints the seconds from the failure to the first reported progress of the next attempt.
"""

import json
import pathlib
from typing import Any

import pytest
from cluster.jobs import SAVE_INTERVAL, E2eJob, lasting, seconds, space, volume
from cluster.runtime import Cluster

from megatronapp_common.names import CHECKPOINT_TRACKER, LABEL_ATTEMPT

pytestmark = pytest.mark.timeout(3600)
NAME, SWAPPED = "spared", "swapped"
SLOW_FROM = 2 * SAVE_INTERVAL
"""Step from which rank 1 is slow: by then the detector knows how fast the ranks are."""
EXCLUDED_S = 86400
"""Default of `nodeExclusion.ttlSeconds`."""


def test_spares_take_the_places_of_deleted_pods(cluster: Cluster, release: str) -> None:
    with space(cluster, NAME) as namespace:
        folder = volume(cluster, namespace, NAME)
        try:
            manifest = lasting(NAME, NAME)
            manifest["spec"]["runPolicy"] |= {"restart": "InPlace", "spares": 1}
            job = E2eJob(cluster, namespace, manifest)
            wait_for_checkpoint(job, folder)
            for attempt, worker in ((1, 1), (2, 0)):
                takes_place(job, attempt, worker)
            shows_cost(job)
        finally:
            cluster.kubectl("delete", "persistentvolume", NAME, "--wait=false")


def test_a_spare_takes_the_place_of_a_slow_node_at_a_checkpoint(cluster: Cluster, release: str) -> None:
    """The fault follows rank 1 to its next node; as the list of excluded nodes is full then, that is used on."""
    with space(cluster, SWAPPED) as namespace:
        folder = volume(cluster, namespace, SWAPPED)
        try:
            manifest = lasting(SWAPPED, SWAPPED)
            spec = manifest["spec"]
            spec["runPolicy"] |= {"restart": "InPlace", "spares": 1, "nodeExclusion": {"maxNodes": 1}}
            spec["analyzer"]["slowNode"] = {"action": "SwapAtCheckpoint", "minSlowdown": 1.3, "minSeconds": 1}
            fault = {"rank": 1, "kind": "compute", "factor": 8, "fromStep": SLOW_FROM, "steps": 1_000_000}
            spec["faults"] = [fault]
            job = E2eJob(cluster, namespace, manifest)
            job.wait(lambda: {"0", "1"} <= nodes(job).keys(), "both workers have nodes")
            before = job.places()
            wait_for_checkpoint(job, folder)
            leaves_slow_node(job, before)
            shows_cost(job)
        finally:
            cluster.kubectl("delete", "persistentvolume", SWAPPED, "--wait=false")


def wait_for_checkpoint(job: E2eJob, folder: pathlib.Path) -> None:
    tracker = folder / "checkpoints" / CHECKPOINT_TRACKER
    job.wait(lambda: tracker.exists() and job.iteration(0) > 0, "a checkpoint")


def takes_place(job: E2eJob, attempt: int, worker: int) -> None:
    """Delete the pod of a worker, and check that the spare trains in its place while the other pod stays."""
    job.wait(lambda: spares_wait(job), "a spare waits")
    before = names(job)
    waiting = before.pop("spare")
    lost, stays = before.pop(str(worker)), before
    job.cluster.kubectl("delete", "pod", lost, "-n", job.namespace, "--wait=false")
    job.wait_for_progress(attempt, SAVE_INTERVAL, f"as attempt {attempt}")
    status = job.status()
    has_place(job, attempt, worker, waiting, stays)
    failure = status["failures"][-1]
    assert failure["worker"] == worker
    took = seconds(status["progressTime"]) - seconds(failure["time"])
    print(f"\na spare has the place of worker {worker}, with progress {took:.1f} s after the failure or before")
    job.wait(lambda: names(job).get("spare") not in {None, waiting}, "another spare is created")


def has_place(job: E2eJob, attempt: int, worker: int, spare: str, stays: dict[str, str]) -> None:
    """Check that a former spare has the place of a worker in an attempt, and that others have their pods."""
    now = names(job)
    assert now[str(worker)] == spare, "the spare has the place"
    assert stays.items() <= now.items(), "the other worker has its pod"
    assert {"worker": worker, "pod": spare} in job.status()["takeovers"]
    attempts = {pod["metadata"]["labels"][LABEL_ATTEMPT] for place, pod in job.places().items() if place != "spare"}
    assert attempts == {str(attempt)}
    assert job.events()["SpareTookOver"].startswith(f"spare {spare} ")


def leaves_slow_node(job: E2eJob, before: dict[str, dict[str, Any]]) -> None:
    """Check that a spare on the other node takes the place of worker 1 at a checkpoint, and that no step is lost.

    `before`: its pods before it trained.
    """
    slow, other = (before[place]["spec"]["nodeName"] for place in ("1", "0"))
    assert slow != other
    job.wait(lambda: "SwapWaits" in job.events(), "a slow node is excluded")
    (excluded,) = job.status()["excludedNodes"]
    assert excluded["node"] == slow, job.status()["slowRanks"]
    job.wait_for_progress(1, SLOW_FROM, "as attempt 1")
    status = job.status()
    (failure,) = status["failures"]
    assert (failure["reason"], failure["worker"], failure["node"]) == ("SlowNodeSwapped", 1, slow)
    assert (status["attempt"], status["restarts"], status.get("restartsTowardsMax", 0)) == (1, 1, 0)
    spare = names(job)["1"]
    has_place(job, 1, 1, spare, {"0": before["0"]["metadata"]["name"]})
    assert job.places()["0"]["metadata"]["uid"] == before["0"]["metadata"]["uid"]
    assert {"NodeExcluded", "SwapWaits", "SlowNodeSwapped", "SpareTookOver"} <= job.events().keys()
    job.wait(lambda: spares_wait(job), "another spare waits")
    assert nodes(job) == {"0": other, "1": other, "spare": other}, "nothing is on the slow node"
    job.wait(lambda: 1 in job.losses(), "losses of attempt 1")
    losses = job.losses()
    assert not losses[0].keys() & losses[1].keys(), "no step is repeated"
    assert min(losses[1]) % SAVE_INTERVAL == 0, "it began at a regular checkpoint"
    waited = seconds(failure["time"]) - (seconds(excluded["until"]) - EXCLUDED_S)
    took = seconds(status["progressTime"]) - seconds(failure["time"])
    print(f"\nthe slow node was left {waited:.1f} s after its exclusion, with progress {took:.1f} s later or before")


def shows_cost(job: E2eJob) -> None:
    """Check that the time for which spares have held nodes is counted."""
    spent = job.status()["timeSpent"]
    print("time spent:", json.dumps(spent))
    assert spent["spareSeconds"] > 0


def spares_wait(job: E2eJob) -> bool:
    return job.condition("SparesReady").get("status") == "True" and "spare" in job.places()


def nodes(job: E2eJob) -> dict[str, str]:
    """Return the nodes of its pods that have one, by place."""
    found = {place: pod["spec"].get("nodeName") for place, pod in job.places().items()}
    return {place: node for place, node in found.items() if node is not None}


def names(job: E2eJob) -> dict[str, str]:
    """Return the names of its pods by place."""
    return {place: pod["metadata"]["name"] for place, pod in job.places().items()}
