"""Training in fp16: the loss scale adapts, overflows skip the update, and layouts and resumed runs agree."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from pytest_workers import FULL

from megatronapp_trainer.errors import NotFiniteError

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Figures = list[tuple[float, float | None, bool]]
STEPS = 8
BATCH = 8 if FULL else 4
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --vocab-size 61 "
    f"--make-vocab-size-divisible-by 4 --global-batch-size {BATCH} --lr 3e-3 --lr-decay-style constant --mock-data "
    f"--train-iters {STEPS} --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --clip-grad 0.7"
)
LOW = "--fp16 --initial-loss-scale 1024 --loss-scale-window 3"
"""No overflow, and the scale doubles twice."""
HIGH = f"--fp16 --initial-loss-scale {2**22} --hysteresis 1"
"""Overflows in the first steps."""
EARLY = f"--fp16 --initial-loss-scale {2**27} --hysteresis 1"
"""No update in the first four steps, and some later."""
TOLERANCE = 4e-3
"""Relative, of losses near 4 over eight steps: fp16 has 11 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """Figures of each step in the log."""

    losses: list[float]
    scales: list[Any]
    """Scale of the loss after each step; None without."""
    skipped: list[bool]


def trained(flags: str) -> Figures | None:
    run = small_training.prepare(f"{MODEL} {flags}")
    return _figures(small_training.train(run))


def resumed(flags: str) -> Figures | None:
    run, manager = small_training.resumed(f"{MODEL} {flags}")
    return _figures(small_training.train(run, checkpoints=manager))


def _figures(recorder: Any) -> Figures | None:
    return None if recorder is None else [(step.loss, step.loss_scale, step.skipped) for step in recorder.steps]


def course_of(run_ranks: RunRanks, world: int, flags: str, function: Callable[..., Any] = trained) -> Course:
    (found,) = [result for result in run_ranks(world, function, flags) if result is not None]
    losses, scales, skipped = (list(values) for values in zip(*found, strict=True))
    return Course(losses=losses, scales=scales, skipped=skipped)


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> Course:
    return course_of(run_ranks, 1, LOW)


def test_losses_are_those_of_fp32(run_ranks: RunRanks, alone: Course) -> None:
    plain = course_of(run_ranks, 1, "")
    assert alone.losses == pytest.approx(plain.losses, rel=TOLERANCE)
    assert alone.losses != plain.losses
    assert plain.scales == [None] * STEPS


def test_the_scale_doubles_after_each_window_without_overflow(alone: Course) -> None:
    assert alone.scales == [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0, 4096.0, 4096.0]
    assert not any(alone.skipped)


def test_an_overflow_skips_the_update_and_halves_the_scale(run_ranks: RunRanks) -> None:
    course = course_of(run_ranks, 1, HIGH)
    assert course.skipped[0]
    assert not all(course.skipped)
    before = [float(2**22), *course.scales]
    assert course.scales == [
        scale / 2 if skipped else scale for scale, skipped in zip(before, course.skipped, strict=False)
    ]


def test_a_fixed_scale_stays(run_ranks: RunRanks, alone: Course) -> None:
    course = course_of(run_ranks, 1, "--fp16 --loss-scale 512")
    assert course.scales == [512.0] * STEPS
    assert course.losses == pytest.approx(alone.losses, rel=TOLERANCE)


@pytest.mark.full("a sweep of layouts", but=("TP2-SP", "VPP2-MegaDPP"))
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-dpp"),
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --accumulate-allreduce-grads-in-fp32"),
    ],
    ids=["TP2-SP", "PP2", "DP2-overlap", "VPP2-MegaDPP", "TP2-PP2"],
)
def test_layouts_agree_with_a_single_rank(run_ranks: RunRanks, alone: Course, world: int, flags: str) -> None:
    course = course_of(run_ranks, world, f"{LOW} {flags}")
    assert course.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    assert course.scales == alone.scales


def test_ranks_skip_together(run_ranks: RunRanks) -> None:
    course = course_of(run_ranks, 2, f"{HIGH} --pipeline-model-parallel-size 2 --use-distributed-optimizer")
    assert course.skipped[0]
    assert not course.skipped[-1]


@pytest.mark.full("a sweep of optimizers", but=("distributed", "before-the-first-update"))
@pytest.mark.parametrize(
    "flags",
    [HIGH, f"{HIGH} --use-distributed-optimizer", EARLY, f"{EARLY} --use-distributed-optimizer"],
    ids=["plain", "distributed", "before-the-first-update", "before-the-first-update-distributed"],
)
def test_a_resumed_run_continues_with_its_scale(run_ranks: RunRanks, tmp_path: pathlib.Path, flags: str) -> None:
    stored = f"{flags} --save {tmp_path} --load {tmp_path}"
    first = course_of(run_ranks, 1, f"{stored} --exit-interval 4", resumed)
    second = course_of(run_ranks, 1, stored, resumed)
    whole = course_of(run_ranks, 1, flags)
    assert first.losses + second.losses == whole.losses
    assert first.scales + second.scales == whole.scales


def with_an_infinite_weight(flags: str) -> str:
    import torch

    run = small_training.prepare(f"{MODEL} {flags}")
    with torch.no_grad():
        next(iter(run.state.chunks[0].parameters())).fill_(float("inf"))
    try:
        small_training.train(run)
    except NotFiniteError as error:
        return str(error)
    return ""


def test_a_loss_that_is_not_finite_is_refused(run_ranks: RunRanks) -> None:
    (message,) = run_ranks(1, with_an_infinite_weight, LOW)
    assert message.startswith("the loss of step 0 is nan (rank 0, microbatch 0)")
