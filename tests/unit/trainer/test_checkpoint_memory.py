"""Checkpoints in the memory of the workers, by real ranks: each rank here is a worker, whose memory is a directory."""

import contextlib
import io
import itertools
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import small_training
from pytest_workers import FULL
from recording_reporter import RecordingReporter

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600 if FULL else 900)]

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --swiglu "
    "--global-batch-size 8 --lr 2e-3 --mock-data --train-iters 100000 --vocab-size 60 --eval-iters 0 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --log-interval 1000"
)
DISTRIBUTED = "--use-distributed-optimizer"
COPIES = "--replication --replication-jump 1"
KILLS = 30 if FULL else 2
LIMIT_S = 400


COPY_BEGINS = threading.Event()
"""Set when a copy of the state may begin: with `late_copies` when an update waits for it, or after that."""
COPY_BEGINS.set()


@contextlib.contextmanager
def late_copies() -> Iterator[None]:
    """Let copies begin as late as possible: those of weights that have changed by then would differ."""
    from megatronapp_trainer.checkpoint.saving import host_copy

    kind = host_copy._ThreadCopy
    create, run, before_change = kind.__init__, kind._run, kind.before_change

    def late_create(self: Any, pairs: Any) -> None:
        COPY_BEGINS.clear()
        create(self, pairs)

    def late_run(self: Any, pairs: Any) -> None:
        COPY_BEGINS.wait()
        run(self, pairs)

    def releasing(self: Any) -> None:
        COPY_BEGINS.set()
        before_change(self)

    with (
        mock.patch.object(kind, "__init__", late_create),
        mock.patch.object(kind, "_run", late_run),
        mock.patch.object(kind, "before_change", releasing),
    ):
        yield


def prepare(folder: str, flags: str) -> tuple[Any, Any, Any]:
    """A run that saves every second step in memory, its checkpoint manager, and its trainer."""
    from megatronapp_common.names import Env
    from megatronapp_trainer.checkpoint.manager import CheckpointManager

    os.environ |= {Env.WORKER_INDEX: os.environ["RANK"], Env.SHM_DIR: f"{folder}/memory", Env.JOB_UID: "uid"}
    pathlib.Path(folder, "memory").mkdir(exist_ok=True)
    run = small_training.prepare(f"{MODEL} --save {folder}/save --non-persistent-save-interval 2 {flags}")
    manager = CheckpointManager(run.config, run.layout)
    manager.load(run.state)
    return run, manager, small_training.trainer_of(run, checkpoints=manager, reporter=RecordingReporter())


def train(run: Any, manager: Any, trainer: Any, last: int) -> list[float]:
    """Train to a step as the loop does; return the losses. What was saved in memory is complete afterwards."""
    found = []
    if manager.memory.resumed is not None and run.state.iteration == manager.memory.resumed.step:
        trainer._save_in_memory()
    while run.state.iteration < last:
        outcome = trainer.step()
        found.append(outcome.loss.mean)
        COPY_BEGINS.set()
        manager.memory.saves.finish()  # so that none is left out because the former is late
        trainer._at_boundary(outcome)
    COPY_BEGINS.set()
    manager.memory.saves.finish()
    return found


def files_of(folder: str, pattern: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(folder, "memory").glob(pattern))


def losses(folder: str, flags: str, last: int) -> tuple[int, list[float]]:
    """Train to a step; return where it began, and the losses."""
    run, manager, trainer = prepare(folder, flags)
    began = run.state.iteration
    return began, train(run, manager, trainer, last)


def lose_and_resume(folder: str, flags: str) -> list[tuple[int, list[float], list[str]]]:
    """Train to step 7, with a checkpoint of step 2 on the disk, and resume after losses of memory.

    Returns where each run began, its losses to step 7, and what the log of rank 0 says.
    """
    import torch.distributed as dist

    found = []
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatronapp_trainer.checkpoint.memory").addHandler(handler)

    def again(action: Callable[[], None]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            action()
        dist.barrier()
        messages.clear()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            run, manager, trainer = prepare(folder, flags)
        messages.append(output.getvalue())
        began = run.state.iteration
        found.append((began, train(run, manager, trainer, 7), list(messages)))

    def lose(*workers: int) -> None:
        """Lose all of step 6, and the memory of workers, as with their nodes."""
        for path in files_of(folder, "*-step6-*"):
            path.unlink()
        for worker in workers:
            for path in files_of(folder, f"*-memory-w{worker}.*"):
                path.unlink()

    def damage() -> None:
        """Change a byte of one part, and cut the end off another."""
        lose()
        (path,) = files_of(folder, "*-w0.rank0-step4-*")
        content = bytearray(path.read_bytes())
        content[1000] ^= 1
        path.write_bytes(content)
        (path,) = files_of(folder, "*-w1.rank1-step4-*")
        os.truncate(path, path.stat().st_size - 1)

    with late_copies():
        run, manager, trainer = prepare(folder, flags)
        first = train(run, manager, trainer, 2)
        trainer._save()
        found.append((0, [*first, *train(run, manager, trainer, 7)], list(messages)))
        again(lambda: lose(1))
        again(damage)
        again(lambda: lose(0, 1))
    messages.clear()
    run, manager, _ = prepare(folder, f"{flags} --clip-grad 0.9")
    found.append((run.state.iteration, [], list(messages)))
    manager.close()
    return found


def test_the_newest_whole_step_is_resumed_bit_for_bit(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    """A worker, single files, or two neighbours are lost. Three workers: copies are on the next."""
    flags = f"{DISTRIBUTED} {COPIES} --global-batch-size 6"
    everyone = run_ranks(3, lose_and_resume, str(tmp_path), flags, timeout_s=LIMIT_S)
    (_, expected, _), *lives = everyone[0]
    assert [began for began, _, _ in lives] == [4, 4, 2, 2]
    for began, found, _ in lives[:3]:
        assert found == expected[began:]
    (_, _, neighbour_lost), (_, _, damaged), (_, _, pair_lost), (_, _, other_flags) = lives
    assert not any("cannot be used" in text or "damaged" in text for text in neighbour_lost)
    assert any(
        "1 ranks received" in text and "on the disk the newest checkpoint is of step 2" in text
        for text in neighbour_lost
    )
    assert any("rank 0 in the memory of" in text and "damaged: its checksum" in text for text in damaged)
    assert any("is not used: it is shorter or longer than it was written" in text for text in damaged)
    assert [text for text in pair_lost if "cannot be used" in text] == [
        "step 4 in memory cannot be used: no worker has the state of rank 0"
    ]
    assert [text for text in other_flags if "not used" in text] == [
        "12 files in the memory of workers are not used: "
        "they were written with other flags, in another layout or by another training"
    ]


def save_while_a_copy_is_late(folder: str, flags: str) -> list[Any]:
    """Save steps 2, 4, 6 and 8, while the copy of step 4 is on its way until step 7; then lose the memory of rank 1."""
    from megatronapp_trainer.checkpoint.memory import saves
    from megatronapp_trainer.checkpoint.memory.exchange import exchange
    from megatronapp_trainer.parallel.agreement import gather_from_all

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatronapp_trainer.checkpoint.memory").addHandler(handler)
    begins, arrives = threading.Event(), threading.Event()

    def late(*arguments: Any) -> None:
        begins.set()
        arrives.wait()
        exchange(*arguments)

    run, manager, trainer = prepare(folder, flags)
    train(run, manager, trainer, 3)
    with mock.patch.object(saves, "exchange", late):
        while run.state.iteration < 6:
            trainer._at_boundary(trainer.step())
        begins.wait()
    at_6 = gather_from_all([path.name for path in files_of(folder, "*.part")])
    arrives.set()
    train(run, manager, trainer, 9)
    at_9 = gather_from_all([path.name for path in files_of(folder, "*.part")])
    if run.layout.rank == 1:
        for path in files_of(folder, "*-memory-w1.*"):
            path.unlink()
    gather_from_all(None)
    while run.state.iteration < 13:
        trainer._at_boundary(trainer.step())
    trainer._save_and_finish()
    return [at_6[0], at_9[0], messages, manager.report.memory.last_failure, files_of(folder, "*")]


def test_a_save_waits_for_the_copies_of_the_former_and_a_failure_ends_saves(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    """The save before stays whole meanwhile. Training continues in any case."""
    everyone = run_ranks(2, save_while_a_copy_is_late, str(tmp_path), f"{DISTRIBUTED} {COPIES}", timeout_s=LIMIT_S)
    at_6, at_9, messages, failure, left = everyone[0]
    assert [name for name in at_6 if "-step2-" in name] and len(at_6) == 4 + 2
    assert {name.split("-")[4] for name in at_6} == {"step2", "step4"}
    assert {name.split("-")[4] for name in at_9} == {"step4", "step8"} and len(at_9) == 8
    assert sum("step 6 is not saved in memory: the save before" in text for text in messages) == 1
    assert sum("no longer saved in memory in this attempt: rank 1: FileNotFoundError" in text for text in messages) == 1
    assert failure.startswith("rank 1: FileNotFoundError")
    assert left == []
    assert everyone[1][3] == failure


def change_the_directory(folder: str) -> list[int]:
    """Return where runs begin after step 2 was saved in memory, and after changes of `--save`."""
    found = []
    save = pathlib.Path(folder, "save")

    def begin(flags: str = "") -> tuple[Any, Any, Any]:
        run, manager, trainer = prepare(folder, flags)
        found.append(run.state.iteration)
        train(run, manager, trainer, 2)
        return run, manager, trainer

    run, manager, trainer = begin()
    trainer._save()
    train(run, manager, trainer, 4)
    begin()
    (save / "iter_0000002").rename(save / "moved")
    begin()  # which the user wanted to go back to the start, and which saves step 2
    begin()
    begin(f"--load {folder}/elsewhere")
    begin(f"--load {folder}/elsewhere")
    small_training.resumed(f"{MODEL} --save {save}")
    begin()
    (save / "memory.json").unlink()
    begin()
    shutil.rmtree(save)
    begin()
    begin()
    return found


def test_memory_is_resumed_by_the_same_training_alone(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    """A removed checkpoint counts once. Then: another `--load`, a run without memory, no token, and no directory."""
    (found,) = run_ranks(1, change_the_directory, str(tmp_path), timeout_s=LIMIT_S)
    assert found == [0, 4, 0, 2, 0, 2, 0, 0, 0, 2]


def end_after_a_resume(folder: str) -> tuple[list[str], list[pathlib.Path]]:
    """Save the last step in memory alone, then resume from it; return the checkpoints on the disk, and the files."""
    train(*prepare(folder, "--train-iters 2"), 2)
    run, _, trainer = prepare(folder, "--train-iters 2")
    assert run.state.iteration == 2
    trainer.train()
    return [path.name for path in pathlib.Path(folder, "save").glob("iter_*")], files_of(folder, "*")


def test_an_end_without_a_step_writes_what_was_in_memory_alone(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    """Memory is deleted at the end, so that the step would be lost otherwise."""
    assert run_ranks(1, end_after_a_resume, str(tmp_path), timeout_s=LIMIT_S) == [(["iter_0000002"], [])]


def train_and_be_killed(folder: str, flags: str, seed: int) -> None:
    """Resume, and save every step in memory, until a random moment at which all ranks are killed."""
    run, manager, trainer = prepare(folder, f"{flags} --non-persistent-save-interval 1")
    first = run.state.iteration
    if run.layout.rank == 0:
        with pathlib.Path(folder, "begins").open("a") as file:
            file.write(f"{first}\n")
    found = {first + 1 + index: loss for index, loss in enumerate(train(run, manager, trainer, first + 2))}
    draft = pathlib.Path(folder, f"draft.{seed}.{run.layout.rank}")
    draft.write_text(json.dumps(found))
    draft.rename(draft.with_name(f"losses.{seed}.{run.layout.rank}"))  # the other rank may end this one while it writes
    delay_s = random.Random(seed).uniform(0, 0.3)
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        trainer._at_boundary(trainer.step())


def test_killed_at_any_moment_a_step_is_whole(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    """Also where the memory of a worker is lost each time."""
    flags = f"{DISTRIBUTED} {COPIES}"
    for seed in range(KILLS):
        with pytest.raises(Exception, match="died with wait status 9"):
            run_ranks(2, train_and_be_killed, str(tmp_path), flags, seed, timeout_s=LIMIT_S)
        for path in files_of(str(tmp_path), f"*-memory-w{seed % 2}.*"):
            path.unlink()
    ((reached, further), _) = run_ranks(2, losses_after, str(tmp_path), flags, timeout_s=LIMIT_S)
    begins = [*map(int, (tmp_path / "begins").read_text().split()), reached]
    assert len(begins) == KILLS + 1
    assert begins[0] == 0
    for former, later in itertools.pairwise(begins):
        assert later >= former + 1, "the newest complete save, or the one before, is that of the second step of a life"
    expected = run_ranks(2, losses_without, DISTRIBUTED, reached + 1, timeout_s=LIMIT_S)[0]
    found = {reached + 1: further[0]}
    for path in tmp_path.glob("losses.*.0"):
        found |= {int(step): loss for step, loss in json.loads(path.read_text()).items()}
    assert found == {step: expected[step - 1] for step in found}


def losses_without(flags: str, last: int) -> list[float]:
    """Train to a step without checkpoints; return the losses."""
    run = small_training.prepare(f"{MODEL} {flags}")
    trainer = small_training.trainer_of(run)
    return [trainer.step().loss.mean for _ in range(last)]


def losses_after(folder: str, flags: str) -> tuple[int, list[float]]:
    """Resume, and train a step more."""
    run, manager, trainer = prepare(folder, f"{flags} --non-persistent-save-interval 1")
    began = run.state.iteration
    return began, train(run, manager, trainer, began + 1)


@pytest.mark.full("layouts differ in what ranks hold")
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        pytest.param(1, "--bf16", id="single"),
        pytest.param(2, DISTRIBUTED, id="DP2-distributed"),
        pytest.param(2, f"{DISTRIBUTED} --bf16 --overlap-param-gather --overlap-grad-reduce", id="DP2-overlap-bf16"),
        pytest.param(2, "--bf16", id="DP2-bf16"),
        pytest.param(2, f"{DISTRIBUTED} --async-save --save-interval 4", id="background"),
        pytest.param(2, "--fp16 --initial-loss-scale 1024 --tensor-model-parallel-size 2", id="TP2-fp16"),
        pytest.param(4, f"{DISTRIBUTED} --pipeline-model-parallel-size 2 --bf16", id="PP2-DP2-bf16"),
        pytest.param(
            2,
            "--use-dpp --pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
            id="MegaDPP",
        ),
        pytest.param(
            4,
            f"{DISTRIBUTED} --num-experts 2 --disable-bias-linear --expert-model-parallel-size 2 "
            "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
            id="experts",
        ),
    ],
)
def test_every_layout_resumes_bit_for_bit(run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str) -> None:
    """The memory of worker 1, if there is one, is lost after step 4."""
    flags = f"{flags} {COPIES if world > 1 else ''}"
    found = run_ranks(world, losses, str(tmp_path), flags, 7, timeout_s=LIMIT_S)
    for path in [*files_of(str(tmp_path), "*-step6-*"), *files_of(str(tmp_path), "*-memory-w1.*")]:
        path.unlink(missing_ok=True)
    assert len(files_of(str(tmp_path), "*-step4-*")) == max(1, 2 * world - 2)
    again = run_ranks(world, losses, str(tmp_path), flags, 7, timeout_s=LIMIT_S)
    assert again == [(4, expected[4:]) for _, expected in found]
