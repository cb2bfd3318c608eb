"""A model with experts resumes as if it had never stopped, also where its experts lie on other ranks."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from pytest_workers import FULL

from megatronapp_trainer.checkpoint import arguments
from megatronapp_trainer.config import parse

RunRanks = Callable[..., list[Any]]

STOP, END = 2, 4
BATCH = 8 if FULL else 4
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --vocab-size 61 "
    f"--global-batch-size {BATCH} --train-iters {END} --eval-iters 0 --lr 1e-2 --lr-decay-style constant --mock-data "
    "--normalization RMSNorm --swiglu --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 "
    "--moe-shared-expert-intermediate-size 16 --moe-layer-freq [0]+[1]*3 --moe-aux-loss-coeff 0.1 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --init-method-std 0.2"
)
STEADY = "--attention-dropout 0 --hidden-dropout 0"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
EP4 = "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
ALL = "--moe-layer-freq 1"
SHARDED = "--use-distributed-optimizer"


def train(flags: str) -> list[float] | None:
    """Losses of a run, on the reporting rank; it resumes if there is something to resume from."""
    run, manager = small_training.resumed(f"{MODEL} {flags}")
    recorder = small_training.train(run, checkpoints=manager)
    return None if recorder is None else recorder.losses


def losses_of(run_ranks: RunRanks, world: int, flags: str) -> list[float]:
    (losses,) = [result for result in run_ranks(world, train, flags) if result is not None]
    return list(losses)


def stop_and_resume(
    run_ranks: RunRanks, save: pathlib.Path, first: tuple[int, str], second: tuple[int, str]
) -> tuple[list[float], list[float]]:
    """Losses of the steps after the stop: in one layout without it, and resumed in another."""
    whole = losses_of(run_ranks, first[0], f"{first[1]} --save {save} --save-interval {STOP}")
    assert len(whole) == END
    shutil.rmtree(save / f"iter_{END:07d}")  # as if the run had ended before
    (save / "latest_checkpointed_iteration.txt").write_text(str(STOP))
    return whole[STOP:], losses_of(run_ranks, second[0], f"{second[1]} --save {save}")


@pytest.mark.torch
@pytest.mark.full("a sweep of layouts", but=("EP2-sharded",))
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        pytest.param(1, "", id="alone"),
        pytest.param(2, f"{EP2} {SHARDED}", id="EP2-sharded"),
        pytest.param(4, f"{EP2} {SHARDED}", id="EP2xDP2-sharded"),
        pytest.param(4, f"{EP2} {PP2}", id="EP2xPP2-plain"),
        pytest.param(4, f"{EP2} {TP2} {SHARDED} --bf16", id="TP2xEP2-sharded-bf16"),
    ],
)
def test_resume_is_bit_equal(run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str) -> None:
    """Train with dropout, so that random states matter, too."""
    whole, resumed = stop_and_resume(run_ranks, tmp_path / "save", (world, flags), (world, flags))
    assert len(resumed) == END - STOP
    assert resumed == whole


@pytest.mark.torch
@pytest.mark.full("a sweep of layouts", but=("EP2-to-TP2",))
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((2, EP2), (2, TP2), id="EP2-to-TP2"),
        pytest.param((4, f"{EP2} {TP2}"), (1, ""), id="TP2xEP2-to-one"),
        pytest.param((4, EP4), (4, f"{EP2} {PP2}"), id="EP4-to-PP2xEP2"),
        pytest.param((1, ""), (4, EP4), id="one-to-EP4"),
        pytest.param((2, f"{EP2} {ALL}"), (4, f"{PP2} {TP2} {ALL}"), id="all-layers"),
    ],
)
def test_experts_move_to_other_ranks(
    run_ranks: RunRanks, tmp_path: pathlib.Path, first: tuple[int, str], second: tuple[int, str]
) -> None:
    worlds = [(world, f"{flags} {STEADY} {SHARDED}") for world, flags in (first, second)]
    whole, resumed = stop_and_resume(run_ranks, tmp_path / "save", worlds[0], worlds[1])
    assert resumed == pytest.approx(whole, rel=2e-5)


def test_other_experts_are_refused_and_the_flags_build_the_model_again() -> None:
    config = parse(MODEL.split())
    stored = arguments.record(config)
    assert arguments.conflict(stored, config, optimizer=True) is None
    other = parse(f"{MODEL} --moe-router-topk 3 --moe-layer-freq 1".split())
    reason = str(arguments.conflict(stored, other, optimizer=False))
    assert "--moe-router-topk (2 there, 3 here)" in reason
    assert "--moe-layer-freq ([0, 1, 1, 1] there, [1, 1, 1, 1] here)" in reason
    again = arguments.model_of(stored)
    assert again.expert_layers(4) == config.model.expert_layers(4)
    assert again.num_experts == 4
    assert again.moe_shared_expert_intermediate_size == 16


@pytest.mark.parametrize(("pattern", "differs"), [("1", False), ("[0]+[1]*3", True)])
def test_the_width_of_dense_layers_is_compared_where_there_are_some(pattern: str, differs: bool) -> None:
    here, there = (parse(f"{MODEL} --moe-layer-freq {pattern} --ffn-hidden-size {width}".split()) for width in (64, 96))
    difference = "it differs in --ffn-hidden-size (64 there, 96 here)" if differs else None
    assert arguments.model_difference(here, there) == difference


def test_a_checkpoint_of_an_earlier_release_has_no_experts() -> None:
    stored = {flag: value for flag, value in arguments.record(parse(MODEL.split())).items() if "expert" not in flag}
    reason = str(arguments.conflict(stored, parse(MODEL.split()), optimizer=False))
    assert "--num-experts (none there, 4 here)" in reason
