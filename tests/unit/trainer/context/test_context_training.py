"""Sequences that are divided over ranks train as whole ones, in every layout, by both ways of attention."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
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


def with_documents(batches: Iterator[Any], first: int) -> Iterator[Any]:
    """The same batches with documents that end at random, where no loss is counted."""
    import torch

    generator = torch.Generator().manual_seed(first)
    for batch in batches:
        begins = torch.rand(batch["tokens"].shape, generator=generator) < 0.15
        begins[:, 0] = True
        places = torch.arange(begins.size(1))
        positions = places - torch.where(begins, places, 0).cummax(1).values
        yield {**batch, "position_ids": positions, "loss_mask": (~begins.roll(-1, 1)).float()}


def packed(flags: str) -> Figures | None:
    """The same of a run on samples of several documents, on a single replica."""
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(f"{MODEL} {flags}")
    data = dataclasses.replace(run.config.data, reset_position_ids="rope" not in flags, reset_attention_mask=True)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    batches = with_documents(build_iterators(run.config, run.layout, 0).train, first=3)
    recorder = small_training.train(run, iterators=DataIterators(train=batches, valid=None, test=None))
    return None if recorder is None else (recorder.losses, recorder.grad_norms)


PACKED = {
    "CP2-p2p": (2, f"{CP2} {SHARDED}"),
    "CP4-p2p": (4, f"{CP4}"),
    "CP2-a2a": (2, f"{CP2} {HEADS}"),
    "CP2xTP2-p2p": (4, f"{CP2} {TP2}"),
    "CP2xPP2-a2a": (4, f"{CP2} {HEADS} {PP2}"),
    "CP2-recomputed": (2, f"{CP2} {RECOMPUTED}"),
    "mask": (1, "--transformer-impl local"),
}


@pytest.mark.full("a sweep of layouts", but=("rotary-CP2-p2p", "learned-CP2-a2a"))
@pytest.mark.parametrize(("world", "layout"), PACKED.values(), ids=list(PACKED))
@pytest.mark.parametrize("flags", [ROTARY, "--calculate-per-token-loss"], ids=["rotary", "learned"])
def test_packed_documents_train_as_in_a_single_process(
    run_ranks: RunRanks, world: int, layout: str, flags: str
) -> None:
    (found,) = [result for result in run_ranks(world, packed, f"{flags} {layout}") if result is not None]
    (expected,) = run_ranks(1, packed, flags)
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


def figures_of(run_ranks: RunRanks, world: int, flags: str) -> Figures:
    (found,) = [result for result in run_ranks(world, trained, flags) if result is not None]
    return found[0], found[1]


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> Callable[[str], Figures]:
    """Figures of one process, once for each set of flags."""
    return functools.cache(functools.partial(figures_of, run_ranks, 1))


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


@pytest.mark.full("a sweep of layouts", but=("CP2xTP2-a2a", "CP2xPP2-p2p"))
@pytest.mark.parametrize("exchange", ["p2p", "a2a"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_layouts_agree_with_a_single_process(
    run_ranks: RunRanks, alone: Any, world: int, layout: str, exchange: str
) -> None:
    """By a ring with rotary positions and separate embeddings, by heads with learned ones and a tied embedding."""
    model = ROTARY if exchange == "p2p" else ""
    losses, norms = figures_of(run_ranks, world, f"{model} {layout} --cp-comm-type {exchange}")
    expected_losses, expected_norms = alone(model)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
