"""Restarts on real nodes: a rank is killed, and the gang trains again from the checkpoint, in its pods or in new ones.

Prints when each phase of the restart was over, in seconds after the kill, from times in the status and in the logs of
the pods; the nodes have one clock.
"""

import contextlib
import json
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest
from cluster.jobs import KILL_RANK, LONG_S, SAVE_INTERVAL, E2eJob, lasting, seconds, space, volume
from cluster.runtime import Cluster

from megatronapp_common.names import ANNOTATION_RESTART, CHECKPOINT_TRACKER, LABEL_ATTEMPT

pytestmark = pytest.mark.timeout(3600)
IN_PLACE, NEW_PODS = "stays", "renewed"
STEPS = 3000
"""Enough that the rank is killed long before the end, also where a step takes some milliseconds."""
Lines = list[tuple[float, str]]
"""Lines of a log, each with the time at which the runtime received it, in seconds."""


def test_killed_rank_restarts_in_its_pod(cluster: Cluster, release: str, tmp_path: pathlib.Path) -> None:
    with training(cluster, IN_PLACE, "InPlace") as job:
        before = job.uids()
        with followed(job, tmp_path) as old_logs:
            killed = kill_rank(job)
            job.wait(lambda: job.attempt > 0, "the operator judges the failure")
            job.wait_for_progress(1, SAVE_INTERVAL, "as attempt 1")
        assert job.uids() == before, "the pods stay"
        pods = job.pods()
        assert {pod["metadata"]["annotations"][ANNOTATION_RESTART].split()[0] for pod in pods} == {"1"}
        assert {state["restartCount"] for pod in pods for state in pod["status"]["containerStatuses"]} == {0}
        check_restart(job)
        ended = [first(read_log(path), r"waiting for the next attempt") for path in old_logs]
        logs = [log(job, index) for index in range(2)]
        begun = [first(lines, r"continuing with attempt 1 in place") for lines in logs]
        print_phases(job, "in place", killed, ended, begun)
        ends(job)


def test_killed_rank_restarts_in_new_pods(cluster: Cluster, release: str, tmp_path: pathlib.Path) -> None:
    with training(cluster, NEW_PODS, "Pods") as job:
        before = job.uids()
        with followed(job, tmp_path) as old_logs:
            killed = kill_rank(job)
            job.wait(lambda: job.attempt > 0, "the operator judges the failure")
            job.wait_for_progress(1, SAVE_INTERVAL, "as attempt 1")
        assert not job.uids() & before, "all pods are new"
        check_restart(job)
        ended = [read_log(path)[-1][0] for path in old_logs]
        begun = [log(job, index)[0][0] for index in range(2)]
        print_phases(job, "new pods", killed, ended, begun)


@contextlib.contextmanager
def training(cluster: Cluster, name: str, restart: str) -> Iterator[E2eJob]:
    """A job of two workers with a checkpoint, which restarts in this way."""
    with space(cluster, name) as namespace:
        folder = volume(cluster, namespace, name)
        try:
            manifest = lasting(name, name)
            manifest["spec"]["runPolicy"]["restart"] = restart
            manifest["spec"]["training"] |= {"trainIters": STEPS, "logInterval": 1}
            job = E2eJob(cluster, namespace, manifest)
            tracker = folder / "checkpoints" / CHECKPOINT_TRACKER
            job.wait(lambda: tracker.exists() and job.iteration(0) > 0, "a checkpoint")
            assert len(job.uids()) == 2
            yield job
        finally:
            cluster.kubectl("delete", "persistentvolume", name, "--wait=false")


@contextlib.contextmanager
def followed(job: E2eJob, folder: pathlib.Path) -> Iterator[list[pathlib.Path]]:
    """Write the logs of its trainers to files while the block runs: those of deleted pods cannot be read later."""
    paths = [folder / f"{job.name}-{index}.log" for index in range(2)]
    with contextlib.ExitStack() as stack:
        for index, path in enumerate(paths):
            pod = f"{job.name}-worker-{index}"
            options = ("-c", "trainer", "-n", job.namespace, "--timestamps", "--follow")
            command = job.cluster.layout.first.inside(*job.cluster.command(), "logs", pod, *options)
            output = stack.enter_context(path.open("wb"))
            process = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL))
            stack.callback(process.kill)
        job.cluster.wait(lambda: all(path.stat().st_size for path in paths), "the first lines of the logs", LONG_S)
        yield paths


def kill_rank(job: E2eJob) -> float:
    """Kill the rank of worker 1, and return the time."""
    pod = f"{job.name}-worker-1"
    command = ("exec", pod, "-c", "trainer", "-n", job.namespace, "--", "python", "-c", KILL_RANK)
    return float(job.cluster.kubectl(*command))


def check_restart(job: E2eJob) -> None:
    """Check that the failure was judged once, and that all pods belong to attempt 1."""
    status = job.status()
    assert {pod["metadata"]["labels"][LABEL_ATTEMPT] for pod in job.pods()} == {"1"}
    failure = status["failures"][-1]
    assert (len(status["failures"]), failure["worker"], failure["reason"]) == (1, 1, "RankKilled")
    assert (status["attempt"], status["restarts"], status["restartsTowardsMax"]) == (1, 1, 1)


def print_phases(job: E2eJob, how: str, killed: float, ended: list[float], begun: list[float]) -> None:
    """Print when each phase was over; `ended`, `begun`: when each launcher's ranks had ended, and began again."""
    logs, status = [log(job, index) for index in range(2)], job.status()
    gathered = [first(lines, r"world of 2 ranks", after=at) for lines, at in zip(logs, begun, strict=True)]
    resumed = either(logs, r"resumes after step (\d+) of", after=min(begun))
    stepped = either(logs, r"iteration +\d+/", after=min(begun))
    phases = {
        "the ranks of all workers have ended": max(ended),
        "the failure is judged": seconds(status["lastRestartTime"]),
        "the next attempt begins": seconds(status["attemptTime"]),
        "the last launcher begins with it": max(begun),
        "the gang has gathered": max(gathered),
        "the checkpoint is loaded": resumed,
        "the first step": stepped,
    }
    print(f"\nrestart with {how}: seconds after a rank was killed until")
    print("\n".join(f"  {at - killed:6.2f}  {name}" for name, at in phases.items()))
    assert killed <= min(begun) <= max(gathered) <= stepped, phases


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
    return parsed(job.cluster.kubectl("logs", pod, "-c", "trainer", "-n", job.namespace, "--timestamps"))


def read_log(path: pathlib.Path) -> Lines:
    """Return a log that was followed; its last line may be incomplete."""
    return parsed(path.read_text(encoding="utf-8", errors="replace"))


def parsed(text: str) -> Lines:
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
