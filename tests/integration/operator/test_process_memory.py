"""A real job on this machine that saves its state in the memory of two workers, and loses a rank, then a worker."""

import os
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import megatronapp_forking
import pytest
import yaml
from served_job import Served

pytestmark = [
    pytest.mark.torch,
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.full("three lives of a real job; ranks alone are in test_checkpoint_memory"),
]

SAVED = re.compile(r"the state of step (\d+) is in memory")
RESUMED = re.compile(r"resumed from the memory of the workers: iteration (\d+), \d+ samples consumed; (\d) ranks")


def document(folder: pathlib.Path, name: str) -> dict[str, Any]:
    model = {"numLayers": 2, "hiddenSize": 32, "numAttentionHeads": 4, "seqLength": 16, "vocabSize": 300}
    training = {"microBatchSize": 1, "globalBatchSize": 4, "trainIters": 1_000_000, "lr": 0.002, "evalIters": 0}
    return {
        "apiVersion": "megatronapp.io/v1alpha1",
        "kind": "MegatronJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": 2,
            "procPerNode": 1,
            "parallelism": {"pipeline": 2},
            "model": model,
            "training": training,
            "data": {"mock": True},
            "checkpoint": {"save": str(folder / "checkpoints"), "memorySaveInterval": 2},
            "runPolicy": {"restart": "InPlace", "backoff": {"initialSeconds": 0.1}},
        },
    }


@pytest.fixture
def job(forkserver: Any, tmp_path: pathlib.Path) -> Iterator[Served]:
    job = Served(tmp_path / "state", "remembered", megatronapp_forking.command(forkserver.python()))
    memory = tmp_path / "memory"
    memory.mkdir()
    job.environment |= {"MEGATRONAPP_SHM_DIR": str(memory)}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path, job.name)), encoding="utf-8")
    job.cli("run", str(path), "--detach")
    yield job
    job.cli("delete", job.name, "--force", "--ignore-not-found")


def log(job: Served, attempt: int) -> str:
    path = job.folder / f"attempt-{attempt}" / "worker-0" / "rank-0.log"
    return path.read_text() if path.exists() else ""


def saved_steps(job: Served, attempt: int) -> list[int]:
    return [int(step) for step in SAVED.findall(log(job, attempt))]


def until_saved(job: Served, attempt: int) -> int:
    """Return a step that is in memory with all its copies: another one was begun since."""
    job._until(lambda: len(saved_steps(job, attempt)) >= 3)
    return saved_steps(job, attempt)[1]


def resumed(job: Served, attempt: int) -> tuple[int, int]:
    """Return the step from which an attempt was resumed, and the ranks that received their state."""
    job._until(lambda: RESUMED.search(log(job, attempt)))
    found = RESUMED.search(log(job, attempt))
    assert found is not None
    return int(found[1]), int(found[2])


def lose_worker(job: Served, memory: pathlib.Path) -> None:
    """Kill the rank of worker 0, and remove its memory while it renames no file."""
    rank = job.rank(0)
    os.kill(rank, signal.SIGSTOP)
    threads = pathlib.Path(f"/proc/{rank}/task")
    job._until(lambda: all(_is_stopped(path / "stat") for path in threads.iterdir()))
    for path in memory.glob("*-memory-w0.*"):
        path.unlink()
    os.kill(rank, signal.SIGKILL)


def _is_stopped(stat: pathlib.Path) -> bool:
    """Return True if a thread runs no longer: it is stopped, or it has ended since it was listed."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_lost_rank_and_a_lost_worker_cost_few_steps(job: Served, tmp_path: pathlib.Path) -> None:
    """Nothing is on the disk: without the memory all steps would be lost. The trained time of the status has them."""
    first = until_saved(job, 0)
    os.kill(job.rank(1), signal.SIGKILL)
    step, received = resumed(job, 1)
    assert step >= first
    assert received == 0
    second = until_saved(job, 1)
    assert second > step
    lose_worker(job, tmp_path / "memory")
    step, received = resumed(job, 2)
    assert step >= second
    assert received == 1
    job._until(lambda: job.status().get("timeSpent", {}).get("attempt") == 2)
    spent = job.status()["timeSpent"]
    assert spent["iteration"] >= step
    assert spent["trained"] > 0
    assert not list((tmp_path / "checkpoints").glob("iter_*"))
    job.cli("delete", job.name, "--force")
    assert not list((tmp_path / "memory").glob("*-memory-*"))
