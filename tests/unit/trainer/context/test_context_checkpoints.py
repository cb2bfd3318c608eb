"""A training with divided sequences resumes as if it had never stopped, and in other layouts."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from recording_reporter import RecordingReporter

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

STOP, END = 2, 4
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --vocab-size 61 "
    f"--global-batch-size 8 --train-iters {END} --eval-iters 1 --eval-interval {END} --lr 3e-3 --adam-eps 1e-4 "
    "--lr-decay-style constant --mock-data --init-method-std 0.2 --use-distributed-optimizer"
)
STEADY = "--attention-dropout 0 --hidden-dropout 0"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
HEADS = "--cp-comm-type a2a"
PP2 = "--pipeline-model-parallel-size 2"


@dataclasses.dataclass
class LossRecorder(RecordingReporter):
    """Reporter that collects the losses of evaluations, too."""

    evaluations: list[float] = dataclasses.field(default_factory=list)

    def validation(self, iteration: int, loss: float, split: str, **details: object) -> None:
        self.evaluations.append(loss)


def train(flags: str) -> tuple[list[float], list[float]] | None:
    """Losses of steps and of evaluations, on the reporting rank; the run resumes if it can."""
    from megatronapp_trainer.parallel.groups import destroy_groups

    run, manager = small_training.resumed(f"{MODEL} {flags}")
    recorder = LossRecorder() if run.layout.is_reporter else None
    small_training.trainer_of(run, checkpoints=manager, reporter=recorder).train()
    destroy_groups()
    return None if recorder is None else (recorder.losses, recorder.evaluations)


def losses_of(run_ranks: RunRanks, world: int, flags: str) -> tuple[list[float], list[float]]:
    (found,) = [result for result in run_ranks(world, train, flags) if result is not None]
    return found[0], found[1]


def stop_and_resume(
    run_ranks: RunRanks, save: pathlib.Path, first: tuple[int, str], second: tuple[int, str]
) -> tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """Losses after the stop: in one layout without it, and resumed in another."""
    steps, evaluations = losses_of(run_ranks, first[0], f"{first[1]} --save {save} --save-interval {STOP}")
    assert len(steps) == END
    shutil.rmtree(save / f"iter_{END:07d}")  # as if the run had ended before
    (save / "latest_checkpointed_iteration.txt").write_text(str(STOP))
    return (steps[STOP:], evaluations), losses_of(run_ranks, second[0], f"{second[1]} --save {save}")


@pytest.mark.full("a sweep of layouts", but=("CP2-heads",))
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        pytest.param(2, f"{CP2} --attention-dropout 0", id="CP2-ring"),
        pytest.param(2, f"{CP2} {HEADS}", id="CP2-heads"),
        pytest.param(4, f"{CP2} {PP2} --attention-dropout 0 --bf16", id="CP2xPP2-bf16"),
        pytest.param(4, f"{CP2} {HEADS}", id="CP2xDP2"),
    ],
)
def test_resume_is_bit_equal(run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str) -> None:
    """Train with dropout, so that random states matter, too."""
    whole, resumed = stop_and_resume(run_ranks, tmp_path / "save", (world, flags), (world, flags))
    assert len(resumed[0]) == END - STOP
    assert resumed == whole


@pytest.mark.full("a sweep of layouts")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((1, ""), (4, f"{CP4} {HEADS}"), id="alone-to-CP4"),
        pytest.param((4, f"{CP2} {PP2}"), (1, ""), id="CP2xPP2-to-alone"),
        pytest.param((4, CP4), (4, f"{CP2} --tensor-model-parallel-size 2"), id="CP4-to-CP2xTP2"),
    ],
)
def test_checkpoints_are_read_in_any_layout(
    run_ranks: RunRanks, tmp_path: pathlib.Path, first: tuple[int, str], second: tuple[int, str]
) -> None:
    worlds = [(world, f"{flags} {STEADY}") for world, flags in (first, second)]
    whole, resumed = stop_and_resume(run_ranks, tmp_path / "save", worlds[0], worlds[1])
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
