"""Real ranks of a training whose gang gets smaller and whole again, with the losses of a gang that stayed whole."""

import contextlib
import os
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from launchers import Gang, wait_until

from megatronapp_common.names import CHECKPOINT_TRACKER, ExitCode

pytestmark = [
    pytest.mark.torch,
    pytest.mark.process,
    pytest.mark.timeout(1800),
    pytest.mark.full("starts seven ranks; test_checkpoint_resume reads a state into another layout"),
]
LIMIT_S = 600.0
"""torch takes its time to start where others are at work, too."""
SAVE_INTERVAL = 5
STEPS = 5
"""Steps that the whole gang trains in the end."""
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --mock-data --vocab-size 100 --log-interval 1 --eval-iters 0 "
    f"--train-iters 100000 --save-interval {SAVE_INTERVAL} --use-distributed-optimizer"
)
TOLERANCE = 1e-4
"""Replicas add gradients in another order; the difference grows with the steps."""
LOSS = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+) ")


@pytest.fixture
def program(forkserver: Any) -> str:
    _, *python = forkserver.python()
    return f"{' '.join(python)} -m megatronapp_trainer.pretrain"


@contextlib.contextmanager
def training(folder: pathlib.Path, program: str, saved: pathlib.Path, *, data: int, attempt: int = 0) -> Iterator[Gang]:
    """Run an attempt with a replica on each of `data` workers."""
    folder.mkdir()
    gang = Gang(folder, proc_per_node=",".join(["1"] * data), program=program)
    gang.arguments = [*FLAGS.split(), "--save", str(saved), "--load", str(saved)]
    gang.launcher_flags = ["--standby-s", "600"]
    cpu = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    each = [{"ATTEMPT_FILE": str(gang.order_file(index))} for index in range(data)]
    with contextlib.closing(gang):
        gang.start({}, each=each, base=cpu, ATTEMPT=str(attempt))
        yield gang


def losses(gang: Gang) -> dict[int, float]:
    """Losses by step, counted from 1, as the rank that reports has printed them."""
    logs = "".join(log.read_text() for log in gang.tmp.glob("worker-*/rank-*.log"))
    return {int(step): float(loss) for step, loss in LOSS.findall(logs)}


def until(gang: Gang, step: int) -> dict[int, float]:
    """Wait for the loss of a step; return those until then, and later ones."""
    wait_until(lambda: max(losses(gang), default=0) >= step, LIMIT_S)
    return losses(gang)


def test_losses_do_not_depend_on_the_number_of_replicas(program: str, tmp_path: pathlib.Path) -> None:
    saved = tmp_path / "checkpoints"
    with training(tmp_path / "whole", program, saved, data=2) as gang:
        until(gang, SAVE_INTERVAL + 1)
        os.killpg(gang.workers[1].process.pid, signal.SIGKILL)  # its rank ends with it
        wait_until(lambda: "waiting for the next attempt" in gang.workers[0].output(), LIMIT_S)
        first = losses(gang)
    with training(tmp_path / "smaller", program, saved, data=1, attempt=1) as gang:
        begin = min(until(gang, max(first) + 1))
        assert (begin - 1) % SAVE_INTERVAL == 0 and begin <= max(first) + 1, "no step is left out"
        gang.order(1, only=0, worker=0, at_checkpoint=True)
        wait_until(lambda: f"ended with code {ExitCode.PREEMPTED}" in gang.workers[0].output(), LIMIT_S)
        second = losses(gang)
        assert int((saved / CHECKPOINT_TRACKER).read_text()) == max(second)
    with training(tmp_path / "grown", program, saved, data=2, attempt=2) as gang:
        third = until(gang, max(second) + STEPS)
        assert min(third) == max(second) + 1
    with training(tmp_path / "reference", program, tmp_path / "unused", data=2) as gang:
        never_smaller = until(gang, max(third))
    for found in (first, second, third):
        assert found == pytest.approx({step: never_smaller[step] for step in found}, rel=TOLERANCE)
