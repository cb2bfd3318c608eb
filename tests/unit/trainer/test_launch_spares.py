"""Real launchers of spares: they wait, take the places of lost workers, and the training continues."""

import contextlib
import json
import os
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from launchers import Gang, alive, wait_until

from megatronapp_common.attempt_order import lock_path
from megatronapp_common.names import CHECKPOINT_TRACKER, ExitCode
from megatronapp_common.processes import is_locked
from megatronapp_common.shared_documents import DocumentReader

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]
SPARE = 2
LIMIT_S = 600.0
"""torch takes its time to start where others are at work, too."""
SAVE_INTERVAL = 20
FLAGS = (
    "--pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 2e-3 --mock-data --vocab-size 100 --log-interval 1 "
    f"--eval-iters 0 --train-iters 100000 --save-interval {SAVE_INTERVAL}"
)
LOSS = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+) ")


@pytest.fixture
def gang(tmp_path: pathlib.Path) -> Iterator[Gang]:
    gang = Gang(tmp_path, proc_per_node="1,1")
    with contextlib.closing(gang):
        yield gang


def start_spare(gang: Gang, actions: dict[Any, str] | None = None, **changes: Any) -> None:
    gang.start(actions or {}, only=SPARE, ATTEMPT_FILE=str(gang.order_file(SPARE)), SPARE="1", **changes)


def start_all(
    gang: Gang, actions: dict[Any, str] | None = None, *, spare: dict[str, str] | None = None, **changes: Any
) -> None:
    """Start a gang of two and a spare, which waits; `spare`: further variables of the latter."""
    each = [{"ATTEMPT_FILE": str(gang.order_file(index))} for index in range(2)]
    gang.start(actions or {}, each=each, **changes)
    start_spare(gang, actions, **changes, **(spare or {}))
    until_logged(gang, SPARE, "waiting as a spare")


def until_logged(gang: Gang, index: int, text: str) -> None:
    """Wait until a launcher has logged a text."""
    wait_until(lambda: text in gang.workers[index].output(), LIMIT_S)


def lose(gang: Gang, index: int, pids: list[int]) -> None:
    """Kill a launcher with its ranks, as the loss of a node does."""
    os.killpg(gang.workers[index].process.pid, signal.SIGKILL)
    gang.workers[index].end(LIMIT_S)
    wait_until(lambda: not any(map(alive, pids)))


def take_over(gang: Gang, lost: int, coordinator: str) -> None:
    """Order attempt 1 with the spare in the place of a worker."""
    gang.order(1, only=1 - lost, worker=1 - lost, coordinator=coordinator)
    gang.order(1, only=SPARE, worker=lost, coordinator=coordinator)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_takes_the_place_of_a_lost_worker(gang: Gang, lost: int) -> None:
    spare_address = f"127.0.0.{2 + SPARE}"
    status_port = gang.reserve(spare_address)
    start_all(gang, {"0@1": "polite", "1@1": "polite"}, spare={"STATUS_PORT": str(status_port)})
    assert is_locked(lock_path(gang.shm, gang.uid, SPARE))
    assert gang.status(f"{spare_address}:{status_port}")["attempt"] == 0, "until it follows an order for another"
    ranks = gang.running({0: [0], 1: [1]})
    lose(gang, lost, [ranks[lost]])
    coordinator = gang.coordinator
    if lost == 0:  # the others gather at the spare
        coordinator = f"{spare_address}:{gang.reserve(spare_address)}"
    take_over(gang, lost, coordinator)
    assert gang.ran(lost, 1, worker=SPARE) == f"demo-w{SPARE}-a1-w{lost}.rank{lost}.ring"
    gang.ran(1 - lost, 1, worker=1 - lost)
    table = json.loads((gang.workers[SPARE].run_dir / "rank-table.json").read_text())
    nodes = {worker["index"]: worker["node"] for worker in table["workers"]}
    assert nodes == {lost: f"node-{SPARE}", 1 - lost: f"node-{1 - lost}"}
    if lost == 0:
        status = gang.status(f"{spare_address}:{status_port}")
        assert (status["attempt"], status["phase"], status["rankTable"]["attempt"]) == (1, "Running", 1)
    gang.workers[SPARE].process.terminate()
    assert gang.workers[SPARE].end() == ExitCode.PREEMPTED
    record = gang.workers[SPARE].record()
    assert (record["attempt"], record["worker"]) == (1, lost)


def test_a_spare_ends_on_request(gang: Gang) -> None:
    start_spare(gang)
    (spare,) = gang.workers
    wait_until(lambda: "waiting as a spare" in spare.output(), LIMIT_S)
    spare.process.terminate()
    assert spare.end() == ExitCode.PREEMPTED


def test_a_spare_checks_its_node_before_it_waits(gang: Gang) -> None:
    needs = json.dumps({"enabled": True, "timeoutSeconds": 5, "shmBytes": 1 << 60})
    start_spare(gang, PREFLIGHT=needs)
    (spare,) = gang.workers
    assert spare.end() == ExitCode.OWN_FAILURE
    record = spare.record()
    assert record["reason"] == "PreflightFailed"
    assert record["message"].startswith(f"the spare on node node-{SPARE}: ")


def test_an_order_without_a_place_is_refused(gang: Gang) -> None:
    start_spare(gang)
    (spare,) = gang.workers
    gang.order(1, only=SPARE)
    assert spare.end() == ExitCode.USAGE
    assert "gives worker 2 of a gang of 2" in spare.record()["message"]


@pytest.mark.torch
def test_training_continues_with_a_spare_and_ends_at_a_checkpoint(forkserver: Any, tmp_path: pathlib.Path) -> None:
    """Steps that are repeated have the losses that they had, and no step follows the last checkpoint."""
    _, *python = forkserver.python()
    gang = Gang(tmp_path, proc_per_node="1,1", program=f"{' '.join(python)} -m megatronapp_trainer.pretrain")
    saved = tmp_path / "checkpoints"
    gang.arguments = [*FLAGS.split(), "--save", str(saved), "--load", str(saved)]
    cpu = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.closing(gang):
        start_all(gang, base=cpu)
        before = tmp_path / "worker-1" / "rank-1.log"
        wait_until(lambda: max(losses(before), default=0) > SAVE_INTERVAL, LIMIT_S)
        gang.order(0, only=1)  # of its own attempt, and so without effect
        lose(gang, 1, [])
        until_logged(gang, 0, "waiting for the next attempt")
        take_over(gang, 1, gang.coordinator)
        after = tmp_path / f"worker-{SPARE}" / "rank-1.log"
        wait_until(lambda: losses(after), LIMIT_S)
        gang.order(1, only=0, worker=0, coordinator=gang.coordinator, at_checkpoint=True)
        until_logged(gang, 0, "ended with code 75 (Preempted)")
        until_logged(gang, SPARE, "ended with code 75 (Preempted)")
        first, second = losses(before), losses(after)
        begin, end = min(second), max(second)
        assert (begin - 1) % SAVE_INTERVAL == 0 and end % SAVE_INTERVAL == 0
        assert begin <= max(first) + 1, "no step is left out"
        again = first.keys() & second.keys()
        assert {step: first[step] for step in again} == {step: second[step] for step in again}
        assert int((saved / CHECKPOINT_TRACKER).read_text()) == end
        page = DocumentReader(gang.shm / f"demo-w{SPARE}-a1-w1.progress")
        with contextlib.closing(page):
            assert page.read() is None, "it is removed with the attempt"


def losses(log: pathlib.Path) -> dict[int, str]:
    """Losses by step, counted from 1, as a rank has printed them."""
    if not log.exists():
        return {}
    return {int(step): loss for step, loss in LOSS.findall(log.read_text())}
