"""Sequences that are divided over ranks train as whole ones, in every layout, by both ways of attention."""

from collections.abc import Callable
from typing import Any

import pytest
import small_training
from pytest_workers import FULL

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Figures = tuple[list[float], list[float]]

STEPS = 6 if FULL else 3
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--seq-length 16 --vocab-size 61 --mock-data --make-vocab-size-divisible-by 4 --micro-batch-size 2 "
    f"--global-batch-size 8 --eval-iters 0 --train-iters {STEPS} --lr 3e-3 --lr-decay-style constant "
    "--clip-grad 0.6 --adam-eps 1e-4 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2"
)
ROTARY = "--position-embedding-type rope --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
HEADS = "--cp-comm-type a2a"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
SHARDED = "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TOLERANCE = 1e-6


def trained(flags: str) -> Figures | None:
    """Losses and gradient norms of a run, on the reporting rank."""
    recorder = small_training.train(small_training.prepare(f"{MODEL} {flags}"))
    return None if recorder is None else (recorder.losses, recorder.grad_norms)


def figures_of(run_ranks: RunRanks, world: int, flags: str) -> Figures:
    (found,) = [result for result in run_ranks(world, trained, flags) if result is not None]
    return found[0], found[1]


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> Callable[[str], Figures]:
    """Figures of one process, once for each set of flags."""
    known: dict[str, Figures] = {}

    def figures(flags: str) -> Figures:
        if flags not in known:
            known[flags] = figures_of(run_ranks, 1, flags)
        return known[flags]

    return figures


LAYOUTS = {
    "CP2": (2, CP2),
    "CP4": (4, f"{CP4} {SHARDED}"),
    "CP2xTP2": (4, f"{CP2} {TP2}"),
    "CP2xPP2": (4, f"{CP2} {PP2} {SHARDED}"),
    "CP2xVPP2": (4, f"{CP2} {VPP2}"),
    "CP2xDP2": (4, f"{CP2} {OVERLAPPED}"),
    "CP2-recomputed": (2, f"{CP2} {RECOMPUTED}"),
    "CP2xDPP": (4, f"{CP2} {VPP2} --use-dpp {SHARDED}"),
    "CP2-vee": (
        4,
        f"{CP2} {PP2} --num-virtual-stages-per-pipeline-rank 2 --use-dpp --dpp-placement vee "
        "--dpp-schedule zero-bubble",
    ),
    "CP2xTP2-DPP": (8, f"{CP2} {TP2} {PP2} --use-dpp"),
    "CP2xPP2-native": (4, f"{CP2} {PP2} --transport native"),
    "CP2-selective": (2, f"{CP2} --recompute-activations"),
}


@pytest.mark.full("a sweep of layouts", but=("CP4-p2p", "CP2xTP2-a2a", "CP2xPP2-p2p"))
@pytest.mark.parametrize("exchange", ["p2p", "a2a"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_layouts_agree_with_a_single_process(
    run_ranks: RunRanks, alone: Any, world: int, layout: str, exchange: str
) -> None:
    losses, norms = figures_of(run_ranks, world, f"{ROTARY} {layout} --cp-comm-type {exchange}")
    expected_losses, expected_norms = alone(ROTARY)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
