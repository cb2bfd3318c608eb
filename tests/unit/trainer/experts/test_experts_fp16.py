"""Experts in fp16 share the loss scale of the other layers, and routers count exactly."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import small_training

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Figures = list[tuple[float, float | None, bool]]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --vocab-size 61 "
    "--make-vocab-size-divisible-by 4 --global-batch-size 8 --lr 3e-3 --lr-decay-style constant --mock-data "
    "--train-iters 6 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --clip-grad 0.7 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 "
    "--moe-z-loss-coeff 0.02 --moe-router-dtype fp32"
)
EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
SHARDED = "--use-distributed-optimizer"
HIGH = f"--fp16 --initial-loss-scale {2**22} --hysteresis 1"
"""Overflows in the first steps."""
TOLERANCE = 4e-3
"""Relative, of losses near 4: fp16 has 11 bits."""


def trained(flags: str) -> Figures | None:
    """Figures of a run on the reporting rank, resumed if there is something to resume from."""
    run, manager = small_training.resumed(f"{MODEL} {flags}")
    recorder = small_training.train(run, checkpoints=manager)
    return None if recorder is None else [(step.loss, step.loss_scale, step.skipped) for step in recorder.steps]


def figures_of(run_ranks: RunRanks, world: int, flags: str) -> Figures:
    (figures,) = [result for result in run_ranks(world, trained, flags) if result is not None]
    return list(figures)


def test_losses_are_those_of_fp32_in_each_layout(run_ranks: RunRanks) -> None:
    expected = [loss for loss, _, _ in figures_of(run_ranks, 1, "")]
    low = "--fp16 --initial-loss-scale 1024 --loss-scale-window 3"
    for world, layout in ((1, ""), (2, f"{EP} {SHARDED}")):
        losses, scales, skipped = zip(*figures_of(run_ranks, world, f"{low} {layout}"), strict=True)
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert scales == (1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0)
        assert not any(skipped)


@pytest.mark.full("without experts the same in test_fp16")
@pytest.mark.parametrize("flags", ["", SHARDED])
def test_a_resumed_run_continues_with_its_scale(run_ranks: RunRanks, tmp_path: pathlib.Path, flags: str) -> None:
    whole = figures_of(run_ranks, 2, f"{HIGH} {EP} {flags}")
    assert whole[0][2], "no overflow"
    assert not whole[-1][2], "no update"
    stored = f"{HIGH} {EP} {flags} --save {tmp_path} --load {tmp_path}"
    first = figures_of(run_ranks, 2, f"{stored} --exit-interval 3")
    assert first + figures_of(run_ranks, 2, stored) == whole


def counted(flags: str) -> tuple[list[float], list[float]]:
    """Tokens that a router has counted for its bias and for its loss, after 70,001 for each expert before."""
    import torch

    run = small_training.prepare(f"{MODEL} {flags}")
    (chunk,) = run.state.chunks
    router = next(module for name, module in chunk.named_modules() if name.endswith(".router"))
    hidden = torch.ones(16, 2, 32, dtype=run.config.precision.dtype)
    for before in (0, 70_001):  # the first pass prepares the router
        router.local_tokens_per_expert.fill_(before)
        router.global_tokens_per_expert.fill_(before)
        router(hidden)
    return router.local_tokens_per_expert.tolist(), router.global_tokens_per_expert.tolist()


@pytest.mark.parametrize("precision", ["--fp16", "--bf16"])
def test_routers_count_exactly_in_half_precision(run_ranks: RunRanks, precision: str) -> None:
    """All tokens are equal, so that two experts take all of them, and the other two none."""
    router = (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type global_aux_loss"
    )
    for counts in run_ranks(1, counted, f"{precision} {router}")[0]:
        assert sorted(counts) == [70_001, 70_001, 70_033, 70_033]


def overflowed(flags: str, where: str) -> list[tuple[bool, float, list[float]]]:
    """Step with gradients that overflow in one kind of weights on the last rank, and then without any overflow.

    Returns for each step whether weights changed, the scale of the loss, and the scale of each chained optimizer.
    """
    run = small_training.prepare(f"{MODEL} {flags}")
    optimizer = run.state.optimizer
    steps = []
    for overflows in (True, False):
        for chunk in run.state.chunks:
            chunk.zero_grad_buffer()
            for name, weight in chunk.named_parameters():
                if overflows and (".experts." in name) is (where == "experts") and run.layout.rank == 1:
                    weight.main_grad.fill_(float("inf"))
            chunk.finish_grad_sync()
        succeeded, _, _ = optimizer.step()
        scales = [float(part.grad_scaler.scale) for part in optimizer.chained_optimizers]
        steps.append((succeeded, float(optimizer.get_loss_scale()), scales))
    return steps


@pytest.mark.parametrize("where", ["experts", "others"])
@pytest.mark.parametrize("flags", ["", SHARDED], ids=["plain", "distributed"])
def test_an_overflow_anywhere_lowers_the_only_scale(run_ranks: RunRanks, flags: str, where: str) -> None:
    scale = "--fp16 --initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 1"
    for steps in run_ranks(2, overflowed, f"{scale} {EP} {flags}", where):
        assert steps == [(False, 512.0, [512.0, 512.0]), (True, 1024.0, [1024.0, 1024.0])]
