"""Checkpoints that are written in the background, by real ranks and their real writer processes.

Writers are forked (`forked_writers`), except that in place of a lost one, which is started as in a job.
"""

import contextlib
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import small_training
from forked_writers import forked_writer
from pytest_workers import FULL
from recording_reporter import RecordingReporter

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600 if FULL else 1800)]

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --swiglu "
    "--global-batch-size 4 --lr 2e-3 --mock-data --train-iters 100000 --vocab-size 60 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0"
)
DISTRIBUTED = "--use-distributed-optimizer"
EXPERTS = "--num-experts 2 --disable-bias-linear --global-batch-size 8"
KILLS = 50 if FULL else 2
LIMIT_S = 800


def prepare(flags: str) -> tuple[Any, Any, Any]:
    """A run that is ready to train or was resumed, its checkpoint manager, and its trainer."""
    from megatronapp_trainer.checkpoint.manager import CheckpointManager

    run = small_training.prepare(f"{MODEL} {flags}")
    manager = CheckpointManager(run.config, run.layout)
    manager.load(run.state)
    recorder = RecordingReporter()
    return run, manager, small_training.trainer_of(run, checkpoints=manager, reporter=recorder)


def train_until(trainer: Any, condition: Callable[[], bool]) -> None:
    """Train, and let checkpoints be written, until the ranks agree on a condition."""
    from megatronapp_trainer.parallel.agreement import gather_from_all

    while not all(gather_from_all(condition())):
        trainer._at_boundary(trainer.step())


@contextlib.contextmanager
def late_copies() -> Iterator[None]:
    """Let copies begin when someone waits for them: those of weights that have changed by then would differ."""
    from megatronapp_trainer.checkpoint.saving import host_copy

    released = threading.Event()
    kind = host_copy._ThreadCopy
    run, before_change, wait = kind._run, kind.before_change, kind.wait

    def late(self: Any, pairs: Any) -> None:
        released.wait()
        run(self, pairs)

    def releasing(method: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(self: Any) -> None:
            released.set()
            method(self)

        return call

    with (
        mock.patch.object(kind, "_run", late),
        mock.patch.object(kind, "before_change", releasing(before_change)),
        mock.patch.object(kind, "wait", releasing(wait)),
    ):
        yield


def save_both_ways(folder: str, flags: str) -> str:
    """Save step 3 at once and in the background, while training continues."""
    from megatronapp_trainer.training.evaluate import gathered_parameters

    with forked_writer():
        run, manager, trainer = prepare(f"{flags} --save {folder}/async --async-save")
    _, at_once, _ = prepare(f"{flags} --save {folder}/sync")
    train_until(trainer, lambda: run.state.iteration == 3)
    with late_copies():
        with gathered_parameters(run):
            at_once.save(run.state)
            manager.save(run.state)
        train_until(trainer, lambda: manager.background.pending is None)
        manager.close()
    return "" if run.state.iteration > 4 else "training did not continue"


def suffer(folder: str, flags: str) -> list[str]:
    """Save while the disk, and then a writer, fails on a rank; return what was reported of each failure."""
    import torch.distributed as dist

    from megatronapp_trainer.checkpoint.saving import background

    background.PAUSES_S = (0.0,)
    Stage = background.SaveStage
    with forked_writer():
        run, manager, trainer = prepare(f"{flags} --save {folder} --async-save")
    saves, is_last = manager.background, dist.get_rank() == dist.get_world_size() - 1
    found = []

    def on_last(action: Callable[[], None]) -> None:
        if is_last:
            action()
        dist.barrier()

    def fail_and_recover(begin: Callable[[], None], fail: Callable[[], None], end: Callable[[], None]) -> None:
        """Save with a fault of the last rank: before the save, once that rank writes, and after the failure."""
        train_until(trainer, lambda: run.state.iteration > trainer._saved_iteration)
        failures = saves.report.failures
        on_last(begin)
        trainer._save()
        train_until(trainer, lambda: saves.report.failures > failures or saves._pending.stage is Stage.WRITE)
        on_last(fail)
        train_until(trainer, lambda: saves.report.failures > failures)
        on_last(end)
        saves.finish()
        found.append(saves.report.last_failure)
        assert saves.report.iteration == trainer._saved_iteration
        assert saves.report.to_json()["takenAt"] is not None

    def limit(size_bytes: int) -> None:
        resource.prlimit(saves.writer_pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    def nothing() -> None: ...

    in_the_way = manager._directory.temporary(1, manager._claim)
    fail_and_recover(in_the_way.touch, nothing, in_the_way.unlink)
    fail_and_recover(lambda: limit(4096), nothing, lambda: limit(resource.RLIM_INFINITY))
    fail_and_recover(
        lambda: os.kill(saves.writer_pid, signal.SIGSTOP), lambda: os.kill(saves.writer_pid, signal.SIGKILL), nothing
    )
    found.append(fail_to_copy(saves, trainer, fails=is_last))
    found.append(wait_for_a_stopped_writer(saves, trainer, stops=is_last))
    manager.close()
    return [*found, str(saves.report.failures)]


def fail_to_copy(saves: Any, trainer: Any, *, fails: bool) -> str:
    """Return what is reported of a copy that does not begin on a rank; the next checkpoint takes its place."""
    from megatronapp_trainer.checkpoint.saving import host_copy

    train_until(trainer, lambda: trainer._state.iteration > trainer._saved_iteration)
    failures = saves.report.failures
    error = RuntimeError("no more streams")
    with mock.patch.object(host_copy, "_begun_copy", side_effect=error) if fails else contextlib.nullcontext():
        trainer._save()
    train_until(trainer, lambda: saves.report.failures > failures and trainer._state.iteration > saves.pending)
    trainer._save()
    saves.finish()
    assert saves.report.iteration == trainer._saved_iteration
    return str(saves.report.last_failure)


def wait_for_a_stopped_writer(saves: Any, trainer: Any, *, stops: bool) -> str:
    """Return how the end of a training fails whose last checkpoint is not written."""
    from megatronapp_trainer.parallel.agreement import gather_from_all

    train_until(trainer, lambda: trainer._state.iteration > trainer._saved_iteration)
    if stops:
        os.kill(saves.writer_pid, signal.SIGSTOP)
    gather_from_all(None)
    saves._exit_wait_s = 0.5
    try:
        trainer._save_and_finish()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_and_be_killed(folder: str, flags: str, seed: int) -> None:
    """Resume, save once, and save at every step until a random moment at which all ranks are killed."""
    with forked_writer():
        run, manager, trainer = prepare(f"{flags} --save {folder}/save --async-save --save-interval 1 --keep-last 3")
    step, first = trainer.step, run.state.iteration

    def noted() -> Any:
        outcome = step()
        with pathlib.Path(folder, f"losses.{run.layout.rank}").open("a") as file:
            file.write(json.dumps([run.state.iteration, outcome.loss.mean]) + "\n")
        return outcome

    trainer.step = noted
    train_until(trainer, lambda: (manager.report.iteration or 0) > first)
    delay_s = random.Random(seed).uniform(0, 0.5)
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train_until(trainer, lambda: False)


def losses(steps: int, flags: str) -> list[float]:
    run, _, trainer = prepare(flags)
    found: list[float] = []
    while run.state.iteration < steps:
        found.append(trainer.step().loss.mean)
    return found


def resume(folder: str, flags: str) -> tuple[int, float]:
    """Resume; the step, and the loss of the next."""
    run, _, trainer = prepare(f"{flags} --save {folder}")
    iteration: int = run.state.iteration
    return iteration, trainer.step().loss.mean


@pytest.mark.full("layouts differ in who holds what", but=("DP2-distributed",))
@pytest.mark.parametrize(
    ("world", "flags", "layout"),
    [
        pytest.param(2, DISTRIBUTED, "", id="DP2-distributed"),
        pytest.param(2, "", "", id="DP2"),
        pytest.param(2, f"{DISTRIBUTED} --bf16", "--tensor-model-parallel-size 2", id="TP2-bf16"),
        pytest.param(4, f"{DISTRIBUTED} {EXPERTS}", "--expert-model-parallel-size 2", id="experts"),
        pytest.param(2, DISTRIBUTED, "--overlap-param-gather --overlap-grad-reduce", id="overlap"),
    ],
)
def test_a_checkpoint_of_the_background_is_that_of_its_step(
    run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str, layout: str
) -> None:
    """Compare the bytes of the data files, also where all replicas write; and resume them on a single rank."""
    assert run_ranks(world, save_both_ways, str(tmp_path), f"{flags} {layout}", timeout_s=LIMIT_S) == [""] * world
    folders = [tmp_path / kind / "iter_0000003" for kind in ("async", "sync")]
    here, there = (json.loads((folder / "megatronapp.json").read_text()) for folder in folders)
    data = [name for name in here["files"] if name.endswith(".distcp")]
    assert data == [f"__{rank}_0.distcp" for rank in range(world)]
    assert [here["checksums"][name] for name in data] == [there["checksums"][name] for name in data]
    assert here["arguments"] == there["arguments"]
    ((iteration, loss),) = run_ranks(1, resume, str(tmp_path / "async"), flags)
    assert iteration == 3
    *_, expected = run_ranks(world, losses, 4, f"{flags} {layout}")[0]
    assert loss == pytest.approx(expected, rel=1e-2 if "--bf16" in flags else 1e-5)


def test_failed_writes_are_tried_again_while_training_continues(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    first, second = run_ranks(2, suffer, str(tmp_path / "save"), DISTRIBUTED, timeout_s=LIMIT_S)
    assert first == second
    begun, written, lost, not_copied, stopped, failures = first
    assert begun.startswith("rank 0: FileExistsError")
    assert written.startswith("rank 1: OSError: ")
    assert lost.startswith("rank 1: the process that writes checkpoints was lost")
    assert not_copied == "rank 1: the state could not be copied: no more streams"
    assert stopped.startswith("StorageError: the checkpoint of step ")
    assert "was not written within 0 s" in stopped
    assert int(failures) >= 3


def test_killed_at_any_moment_the_newest_checkpoint_loads(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    for seed in range(KILLS):
        with pytest.raises(Exception, match="died with wait status 9"):
            run_ranks(2, train_and_be_killed, str(tmp_path), DISTRIBUTED, seed, timeout_s=LIMIT_S)
    found = [json.loads(line) for line in (tmp_path / "losses.0").read_text().splitlines()]
    reached, _ = run_ranks(2, resume, f"{tmp_path}/save", DISTRIBUTED)[0]
    begins = [step for step, _ in found if step == 1] + [
        step for (former, _), (step, _) in itertools.pairwise(found) if step <= former
    ]
    assert len(begins) == KILLS, "a life began from the start, or not from a checkpoint"
    assert begins.count(1) == 1
    assert begins[-1] <= reached
    expected = run_ranks(2, losses, max(step for step, _ in found), DISTRIBUTED, timeout_s=LIMIT_S)[0]
    assert [loss for _, loss in found] == [expected[step - 1] for step, _ in found]
