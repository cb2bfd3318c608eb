"""Every layout trains alike: some steps against one process."""

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from pytest_workers import FULL
from recording_reporter import RecordingReporter

from megatronapp_trainer.errors import UsageErrors

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

STEPS = 10 if FULL else 3
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    f"--global-batch-size 8 --train-iters {STEPS} --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
)
UNTIED = "--untie-embeddings-and-output-weights --clip-grad 0"
QWEN = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --qk-layernorm --kv-channels 32 "
    "--init-method-std 0.2 --adam-eps 1e-4"
)
"""Weights so large that attention, and so the gradients of its norms, matter to the losses."""
TOLERANCE = 1e-5


def train(flags: str) -> tuple[list[float], list[float]] | None:
    """Losses and gradient norms of a run, on the reporting rank."""
    warnings.simplefilter("ignore")
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of, vocab_size_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    config = parse(f"{MODEL} {flags}".split())
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=vocab_size_of(config))
    recorder: Any = RecordingReporter() if layout.is_reporter else None
    Trainer(
        run, build_iterators(config, layout, 0), build_schedule(run), stop_request=StopRequest(), reporter=recorder
    ).train()
    destroy_groups()
    return (recorder.losses, recorder.grad_norms) if recorder is not None else None


def losses_of(run_ranks: RunRanks, world: int, flags: str) -> tuple[list[float], list[float]]:
    (result,) = [result for result in run_ranks(world, train, flags) if result is not None]
    return tuple(result)


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> Callable[[str], tuple[list[float], list[float]]]:
    """Losses of one process, once for each set of flags."""
    return functools.cache(functools.partial(losses_of, run_ranks, 1))


@pytest.mark.full("a sweep of layouts", but=("VPP",))
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, "--pipeline-model-parallel-size 2", id="PP2"),
        pytest.param(4, "--pipeline-model-parallel-size 4", id="PP4"),
        pytest.param(2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", id="VPP"),
        pytest.param(
            2,
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            id="VPP-no-overlap",
        ),
    ],
)
def test_pipelines_are_bit_equal_to_a_single_process(run_ranks: RunRanks, alone: Any, world: int, layout: str) -> None:
    losses, _ = losses_of(run_ranks, world, f"{UNTIED} {layout}")
    assert len(losses) == STEPS
    assert losses == alone(UNTIED)[0]


@pytest.mark.full("a sweep of layouts", but=("both",))
@pytest.mark.parametrize(
    ("world", "layers", "stage_flags"),
    [
        pytest.param(2, 4, "--decoder-first-pipeline-num-layers 3", id="first"),
        pytest.param(2, 4, "--decoder-last-pipeline-num-layers 1 --use-distributed-optimizer", id="last"),
        pytest.param(4, 5, "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1", id="both"),
        pytest.param(2, 3, "--account-for-loss-in-pipeline-split", id="loss"),
        pytest.param(
            4, 2, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", id="alone"
        ),
        pytest.param(
            2, 6, "--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", id="chunks"
        ),
        pytest.param(
            2, 7, "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2", id="loss-chunks"
        ),
    ],
)
def test_uneven_stages_are_bit_equal_to_a_single_process(
    run_ranks: RunRanks, alone: Any, world: int, layers: int, stage_flags: str
) -> None:
    model = f"{UNTIED} --num-layers {layers} --train-iters 4"
    losses, _ = losses_of(run_ranks, world, f"{model} --pipeline-model-parallel-size {world} {stage_flags}")
    assert losses == alone(model)[0]


SPLIT = {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    # the grouped model has 2 key heads: each is held by two ranks
    "TP4+SP": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "TP2xPP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "PP2-tied-clipped": (2, "--pipeline-model-parallel-size 2"),
    "PP2xDP2": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
    "DP2-overlap": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "full-recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "selective-recompute": (1, "--recompute-activations"),
    "local-layers": (1, "--transformer-impl local"),
}
"""These cut the model itself, its states or its layers."""
WHOLE = {
    "DP2": (2, ""),
    "DP2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "per-token-loss": (1, "--calculate-per-token-loss"),
    "deterministic": (1, "--deterministic-mode"),
    "DP2-per-token-loss": (2, "--calculate-per-token-loss"),
    "DP2-averaged": (2, "--ddp-average-in-collective"),
}
"""These know nothing of the model, so that one of the two is enough."""
CASES = {
    **{f"gpt-{name}": (world, layout, "") for name, (world, layout) in {**SPLIT, **WHOLE}.items()},
    **{f"qwen-{name}": (world, layout, QWEN) for name, (world, layout) in SPLIT.items()},
}


CORNERS = (
    "gpt-TP2xPP2",
    "gpt-PP2-tied-clipped",
    "gpt-DP2-overlap",
    "gpt-local-layers",
    "qwen-TP2",
    "qwen-selective-recompute",
)
"""Each way to cut the model, with one of the two models; TP4+SP, which takes a third of the time, is none of them.

Full recomputation is that of the test with dropout, a loss per token that of test_trainer_uneven."""


@pytest.mark.full("a sweep of layouts and models", but=CORNERS)
@pytest.mark.parametrize(("world", "layout", "model"), CASES.values(), ids=list(CASES))
def test_layouts_agree_with_a_single_process(
    run_ranks: RunRanks, alone: Any, world: int, layout: str, model: str
) -> None:
    losses, norms = losses_of(run_ranks, world, f"{model} {layout}")
    assert losses == pytest.approx(alone(model)[0], rel=TOLERANCE)
    assert norms == pytest.approx(alone(model)[1], rel=1e-4)


def test_the_loss_falls(alone: Any) -> None:
    losses = alone("--train-iters 20")[0]
    assert losses[-1] < losses[0] - 0.3


def test_dropout_with_recomputation_equals_dropout_without(run_ranks: RunRanks) -> None:
    """The backward pass draws the same masks again, within the tracker's states and outside them."""
    two = "--tensor-model-parallel-size 2 --train-iters 3 --global-batch-size 4 --num-layers 2"
    dropout = f"{two} --attention-dropout 0.1 --hidden-dropout 0.1"
    plain = losses_of(run_ranks, 2, dropout)
    again = losses_of(
        run_ranks, 2, f"{dropout} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    assert plain == again
    assert plain[0] != losses_of(run_ranks, 2, two)[0]


def train_and_count(flags: str) -> tuple[tuple[list[float], list[float]] | None, int]:
    """Return what `train` returns, and the number of forward passes of MLPs."""
    from megatron.core.transformer.mlp import MLP

    with mock.patch.object(MLP, "forward", autospec=True, side_effect=MLP.forward) as forward:
        return train(flags), forward.call_count


def test_recomputed_parts_change_no_bit(run_ranks: RunRanks, alone: Any) -> None:
    parts = "--recompute-granularity selective --recompute-modules core_attn mlp"
    ((found, passes),) = run_ranks(1, train_and_count, f"{QWEN} {parts}")
    assert tuple(found) == alone(QWEN)
    assert passes == 2 * STEPS * 4 * 4, "4 layers of 4 microbatches"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recompute-modules mlp", "--recompute-modules needs --recompute-granularity selective"),
        ("--recompute-activations --recompute-modules mlp", "mlp needs --disable-bias-linear"),
        ("--recompute-activations --recompute-modules moe core_attn", "--recompute-modules moe needs --num-experts"),
        ("--recompute-activations --recompute-modules layernorm", "invalid choice: 'layernorm'"),
        (
            f"{QWEN} --recompute-activations --recompute-modules mlp --forward-backward-disaggregating",
            "--recompute-modules mlp and --forward-backward-disaggregating cannot be combined",
        ),
    ],
)
def test_parts_that_cannot_be_recomputed_are_refused(flags: str, message: str) -> None:
    from megatronapp_trainer.config import parse

    with pytest.raises(UsageErrors) as raised:
        parse(f"{MODEL} {flags}".split())
    assert message in str(raised.value)


def test_bf16_follows_fp32(run_ranks: RunRanks, alone: Any) -> None:
    losses, _ = losses_of(run_ranks, 1, "--bf16")
    assert losses == pytest.approx(alone("")[0], abs=0.02)
    assert losses != alone("")[0]
