"""SIGTERM in every phase of a run: the exit code, the checkpoints, and that the restart ends as if nothing had been."""

import contextlib
import importlib
import io
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pytest_workers import FULL

from megatronapp_common.names import Env, ExitCode
from megatronapp_common.shared_documents import DocumentReader

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --vocab-size 40 "
    "--global-batch-size 2 --train-iters 4 --lr 1e-2 --mock-data --save-interval 2 --eval-interval 2 --eval-iters 3"
)
STOPPED, DONE = int(ExitCode.PREEMPTED), int(ExitCode.OK)
PHASES = {
    "groups": ("parallel.groups:initialize_groups", 1, (STOPPED, [1])),
    "model": ("training.build:build_run", 1, (STOPPED, [1])),
    "load": ("checkpoint.manager:CheckpointManager.load", 1, (STOPPED, [1])),
    "data": ("training.build:build_iterators", 1, (STOPPED, [1])),
    "first step": ("pipeline.megatron_schedules:StaticSchedule.train", 1, (STOPPED, [1])),
    "optimizer": ("training.step:reduce_loss", 3, (STOPPED, [2, 4])),
    "evaluation": ("training.evaluate:evaluate", 1, (STOPPED, [2])),
    "save": ("checkpoint.manager:CheckpointManager.save", 1, (STOPPED, [2, 3])),
    "files of a save": ("checkpoint.manager:write_rank_file", 1, (STOPPED, [2, 3])),
    "publishing": ("checkpoint.directory:CheckpointDirectory.publish", 1, (STOPPED, [2, 3])),
    "last step": ("pipeline.megatron_schedules:StaticSchedule.train", 4, (STOPPED, [2, 4])),
    "last save": ("checkpoint.manager:CheckpointManager.save", 2, (STOPPED, [2, 4])),
    "test": ("training.evaluate:evaluate", 3, (STOPPED, [2, 4])),
    "end": ("parallel.groups:destroy_groups", 1, (DONE, [2, 4])),
}
"""Places of the signal: which call of which function; then the exit code, and the checkpoints that there are."""
if not FULL:  # before the first step and after the last one little differs
    for name in ("groups", "load", "data", "files of a save", "last save", "last step"):
        del PHASES[name]


@contextlib.contextmanager
def signal_at(place: str, call: int) -> Iterator[None]:
    """Within, the function sends SIGTERM to this process when it is called for the `call`-th time."""
    module, _, path = place.partition(":")
    owner = importlib.import_module(f"megatronapp_trainer.{module}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function, calls = getattr(owner, name), 0

    def signalling(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **kwargs)

    setattr(owner, name, signalling)
    try:
        yield
    finally:
        setattr(owner, name, function)


def lives(folder: str) -> dict[str, tuple[Any, ...]]:
    """Return for each phase the exit code and checkpoints of the run that is stopped there, and code and last page of
    its restart."""
    import warnings

    from megatronapp_trainer.pretrain import main

    warnings.simplefilter("ignore")
    os.environ |= {Env.SHM_DIR: folder, Env.SHM_PREFIX: "run"}
    found: dict[str, tuple[Any, ...]] = {}
    for phase, (place, call, _) in {"none": ("training.evaluate:evaluate", 1000, None), **PHASES}.items():
        save = pathlib.Path(folder, phase.replace(" ", "-"))
        arguments = [*FLAGS.split(), "--save", str(save)]
        with contextlib.redirect_stdout(io.StringIO()):
            with signal_at(place, call):
                code = int(main(arguments))
            checkpoints = sorted(int(path.name.removeprefix("iter_")) for path in save.glob("iter_*"))
            again = int(main(arguments)) if code == STOPPED else code
        page = DocumentReader(pathlib.Path(folder, "run.progress")).read() or {}
        end = {name: page.get(name) for name in ("iteration", "validationLoss", "state")}
        found[phase] = ((code, checkpoints), (again, end))
    return found


def test_a_run_that_is_stopped_in_any_phase_continues(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    (found,) = run_ranks(1, lives, str(tmp_path))
    whole, end = found.pop("none")
    assert whole == (DONE, [2, 4])
    assert end[1]["validationLoss"] is not None
    assert {phase: first for phase, (first, _) in found.items()} == {
        phase: want for phase, (*_, want) in PHASES.items()
    }
    assert {phase: last for phase, (_, last) in found.items()} == dict.fromkeys(PHASES, end)
