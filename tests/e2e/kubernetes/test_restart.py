"""Restart in place on real nodes: a rank is killed, the pods stay, and the gang trains from the checkpoint to the end.

Prints how long each phase of the restart took, from times in the status and in the logs of the pods.
"""

import json
import re

import pytest
from cluster.jobs import KILL_RANK, LONG_S, SAVE_INTERVAL, E2eJob, lasting, seconds, space, volume
from cluster.runtime import Cluster

from megatronapp_common.names import ANNOTATION_RESTART, CHECKPOINT_TRACKER, LABEL_ATTEMPT

pytestmark = pytest.mark.timeout(3600)
NAME = "stays"
STEPS = 3000
"""Enough that the rank is killed long before the end, also where a step takes some milliseconds."""
Lines = list[tuple[float, str]]
"""Lines of a log, each with the time at which the runtime received it, in seconds."""


def test_killed_rank_restarts_in_its_pod(cluster: Cluster, release: str) -> None:
    with space(cluster, NAME) as namespace:
        folder = volume(cluster, namespace, NAME)
        try:
            manifest = lasting(NAME, NAME)
            manifest["spec"]["runPolicy"]["restart"] = "InPlace"
            manifest["spec"]["training"] |= {"trainIters": STEPS, "logInterval": 1}
            job = E2eJob(cluster, namespace, manifest)
            tracker = folder / "checkpoints" / CHECKPOINT_TRACKER
            job.wait(lambda: tracker.exists() and job.iteration(0) > 0, "a checkpoint")
            before = job.uids()
            assert len(before) == 2
            cluster.kubectl(
                "exec", f"{NAME}-worker-1", "-c", "trainer", "-n", namespace, "--", "python", "-c", KILL_RANK
            )
            restarts_in_place(job, before)
            ends(job)
        finally:
            cluster.kubectl("delete", "persistentvolume", NAME, "--wait=false")


def restarts_in_place(job: E2eJob, before: set[str]) -> None:
    """Check that the pods of attempt 0 train as attempt 1, from a checkpoint, and print the phases of the restart."""
    job.wait(lambda: job.attempt > 0, "the operator judges the failure")
    job.wait_for_progress(1, SAVE_INTERVAL, "as attempt 1")
    status, pods, logs = job.status(), job.pods(), [log(job, index) for index in range(2)]
    assert job.uids() == before, "the pods stay"
    assert {pod["metadata"]["labels"][LABEL_ATTEMPT] for pod in pods} == {"1"}
    assert {pod["metadata"]["annotations"][ANNOTATION_RESTART].split()[0] for pod in pods} == {"1"}
    assert {state["restartCount"] for pod in pods for state in pod["status"]["containerStatuses"]} == {0}
    failure = status["failures"][-1]
    assert (len(status["failures"]), failure["worker"], failure["reason"]) == (1, 1, "RankKilled")
    assert (status["attempt"], status["restarts"], status["restartsTowardsMax"]) == (1, 1, 1)

    died = first(logs[1], r"rank 1 ended with signal 9")
    ordered = [first(lines, r"continuing with attempt 1 in place") for lines in logs]
    gathered = [first(lines, r"world of 2 ranks", after=at) for lines, at in zip(logs, ordered, strict=True)]
    resumed = either(logs, r"resumes after step (\d+) of", after=min(ordered))
    stepped = either(logs, r"iteration +\d+/", after=min(ordered))
    phases = {
        "rank ended to failure judged": seconds(failure["time"]) - died,
        "to the order of the operator": seconds(status["attemptTime"]) - seconds(failure["time"]),
        "to the order in the last pod": max(ordered) - seconds(status["attemptTime"]),
        "to a gang that has gathered": max(gathered) - max(ordered),
        "to the checkpoint loaded": resumed - max(gathered),
        "to the first step": stepped - resumed,
    }
    print(f"\nrestart in place, {stepped - died:.1f} s from the end of the rank to the first step:")
    print("\n".join(f"  {took:6.2f} s  {name}" for name, took in phases.items()))
    assert died <= min(ordered) <= max(gathered) <= stepped, phases


def ends(job: E2eJob) -> None:
    """Check that attempt 1 trains every step from its checkpoint to the last one, and that no time is missing."""
    losses: dict[int, dict[int, float]] = {}

    def read() -> bool:
        losses.update(job.losses())
        return job.status().get("phase") == "Succeeded" or max(losses.get(1, {0: 0.0})) >= STEPS - 1

    job.wait(read, "the last step", 2 * LONG_S)
    job.wait(lambda: job.status().get("phase") == "Succeeded", "the job ends")
    status = job.status()
    assert (status["attempt"], status["restarts"]) == (1, 1)
    start = min(losses[1])
    assert start % SAVE_INTERVAL == 0 and start >= SAVE_INTERVAL, "it began at a checkpoint"
    assert start <= max(losses[0]) + 1, "no step is left out"
    again = sorted(losses[0].keys() & losses[1].keys())
    assert [losses[1][step] for step in again] == pytest.approx([losses[0][step] for step in again], rel=1e-5)
    spent = status["timeSpent"]
    print("time spent:", json.dumps(spent))
    assert spent["trained"] > 0 and spent["restarts"] > 0


def log(job: E2eJob, index: int) -> Lines:
    """Return the log of a trainer, of all attempts of its pod."""
    pod = f"{job.name}-worker-{index}"
    text = job.cluster.kubectl("logs", pod, "-c", "trainer", "-n", job.namespace, "--timestamps")
    found = (line.partition(" ") for line in text.splitlines())
    return [(seconds(at), line) for at, space_between, line in found if space_between]


def first(lines: Lines, pattern: str, *, after: float = 0.0) -> float:
    """Return when a line of this pattern was first written."""
    at = earliest(lines, pattern, after)
    assert at is not None, (pattern, lines[-40:])
    return at


def either(logs: list[Lines], pattern: str, *, after: float) -> float:
    """Return when a rank of any worker first wrote a line of this pattern."""
    found = (earliest(lines, pattern, after) for lines in logs)
    times = [at for at in found if at is not None]
    assert times, (pattern, [lines[-40:] for lines in logs])
    return min(times)


def earliest(lines: Lines, pattern: str, after: float) -> float | None:
    return next((at for at, line in lines if at >= after and re.search(pattern, line)), None)
