"""Gang of real ranks with uneven workers: one launcher is asked to stop, all save at the same step, and continue."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from launchers import Gang, wait_until
from pytest_workers import FULL

from megatronapp_common.names import ExitCode
from megatronapp_common.shared_documents import DocumentReader

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.timeout(1800)]
LIMIT_S = 600
"""torch takes its time to start where others are at work, too."""

RANKS = [1, 2] if FULL else [1, 1]
"""Ranks of each worker; each is a process of torch, and test_launch_pod numbers those of uneven workers."""
FLAGS = (
    f"--pipeline-model-parallel-size {sum(RANKS)} --num-layers {sum(RANKS)} --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 3 --lr 2e-3 --mock-data --vocab-size 100 --log-interval 1 --eval-iters 0"
)
RACKS = [{"TOPOLOGY": "rack-b"}, {"TOPOLOGY": "rack-a"}]


@pytest.fixture
def gang(forkserver: Any, tmp_path: pathlib.Path) -> Iterator[Gang]:
    _, *python = forkserver.python()
    gang = Gang(tmp_path, ",".join(map(str, RANKS)), program=f"{' '.join(python)} -m megatronapp_trainer.pretrain")
    yield gang
    gang.close()


def start(gang: Gang, steps: int, attempt: int, *flags: str) -> None:
    """Start the ranks of worker 1 first; so the last stage, which reports, runs on worker 0."""
    gang.arguments = [*FLAGS.split(), "--train-iters", str(steps), "--save", str(gang.tmp / "checkpoints")]
    gang.arguments += ["--load", str(gang.tmp / "checkpoints"), *flags]
    cpu = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    gang.start({}, each=RACKS, base=cpu, RANK_ORDER="topology", ATTEMPT=str(attempt))


def stop_single(gang: Gang) -> int:
    """Request a stop of one launcher while all train; return the step at which all have saved."""
    start(gang, 100_000, 0)
    page = DocumentReader(gang.shm / "demo-w0.progress")
    wait_until(lambda: (page.read() or {}).get("iteration", 0) >= 2, LIMIT_S)
    gang.workers[1].process.terminate()
    assert [worker.end(LIMIT_S) for worker in gang.workers] == [ExitCode.PREEMPTED] * 2
    for worker in gang.workers:
        record = worker.record()
        assert (record["reason"], record["message"]) == ("Preempted", "checkpointed and stopped, as asked")
    last = page.read()
    page.close()
    assert last is not None
    saved = [path.name for path in (gang.tmp / "checkpoints").glob("iter_*")]
    assert saved == [f"iter_{last['iteration']:07d}"]
    table = json.loads((gang.workers[1].run_dir / "rank-table.json").read_text())
    assert [(worker["index"], worker["ranks"]) for worker in table["workers"]] == [
        (1, list(range(RANKS[1]))),
        (0, [RANKS[1]]),
    ]
    step: int = last["iteration"]
    return step


def test_a_launcher_requested_to_stop_makes_all_save_at_the_same_step(gang: Gang) -> None:
    stop_single(gang)


@pytest.mark.full("starts three more ranks; test_trainer_sigterm resumes after a stop in each phase")
def test_ranks_that_were_stopped_continue(gang: Gang) -> None:
    step = stop_single(gang)
    gang.workers.clear()
    start(gang, step, 1, "--override-opt_param-scheduler")  # nothing is left to train
    assert [worker.end(LIMIT_S) for worker in gang.workers] == [ExitCode.OK] * 2
    assert [worker.record()["reason"] for worker in gang.workers] == ["Completed"] * 2
    assert f"the checkpoint has {step} steps" in (gang.workers[0].run_dir / "rank-2.log").read_text()
    assert [path.name for path in (gang.tmp / "checkpoints").glob("iter_*")] == [f"iter_{step:07d}"]
