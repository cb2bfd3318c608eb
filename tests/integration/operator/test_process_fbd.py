"""MegaFBD from manifest to weights: the job of examples/fbd.yaml, run by `megatronapp run` with real ranks."""

import json
import pathlib
from typing import Any

import pytest
from example_runs import QUIET, STEPS, ExampleRuns

pytestmark = [pytest.mark.process, pytest.mark.torch]
SHORT = {"training": {"trainIters": STEPS, "logInterval": 1, "lrWarmupIters": 1, "globalBatchSize": 8, "evalIters": 1}}
"""Four microbatches instead of sixteen."""
PLAIN = {"fbd": None, "procPerNode": 2, **QUIET}


def roles(folder: pathlib.Path, name: str) -> dict[int, list[str]]:
    """Return the roles of each worker's ranks, and compare the counts of the status with them."""
    status = json.loads((folder / "state" / "megatronapp" / "jobs" / name / "status.json").read_text())
    workers = {worker["index"]: worker["roles"] for worker in status["rankTable"]["workers"]}
    everyone = [role for of_worker in workers.values() for role in of_worker]
    assert status["worldSize"] == len(everyone)
    assert status["dataParallelSize"] == 2
    assert status["fbd"]["forwardRanks"] == everyone.count("forward")
    assert status["fbd"]["backwardRanks"] == everyone.count("backward")
    return workers


@pytest.mark.full("the next test has the same ranks on two workers; layouts are compared in test_fbd_training")
def test_the_example_has_the_losses_of_the_same_job_without_it(forkserver: Any, tmp_path: pathlib.Path) -> None:
    runs = ExampleRuns(forkserver, tmp_path)
    separate = runs.losses("fbd", "separate")
    assert len(separate) == STEPS
    assert separate == runs.losses("fbd", "plain", **PLAIN)
    assert roles(tmp_path, "separate") == {0: ["backward", "backward", "forward"]}


def test_a_laptop_runs_forward_ranks_on_a_worker_of_their_own(forkserver: Any, tmp_path: pathlib.Path) -> None:
    runs = ExampleRuns(forkserver, tmp_path)
    apart = runs.losses("fbd", "apart", fbd={"forward": {"nodes": 1}}, procPerNode=2, **QUIET, **SHORT)
    assert len(apart) == STEPS
    assert apart == runs.losses("fbd", "plain", **PLAIN, **SHORT)
    assert roles(tmp_path, "apart") == {0: ["backward", "backward"], 1: ["forward"]}
