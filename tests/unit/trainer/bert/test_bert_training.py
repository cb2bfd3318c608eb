"""BERT trains as plain torch does, and alike in every layout, schedule and after a resume."""

import functools
from collections.abc import Callable
from typing import Any

import late_inputs
import pytest
import small_training
from pytest_workers import FULL

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Figures = tuple[list[float], list[float]]

LAYERS, HIDDEN, HEADS, STEPS = 4, 32, 4, 6 if FULL else 3
MODEL = (
    f"--model-type bert --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length 24 "
    "--max-position-embeddings 32 --vocab-size 61 --make-vocab-size-divisible-by 4 --mock-data --micro-batch-size 2 "
    f"--global-batch-size 8 --train-iters {STEPS} --eval-iters 0 --lr 1e-2 --lr-decay-style constant --clip-grad 0.6 "
    "--weight-decay 0.1 --adam-beta2 0.95 --adam-eps 1e-6 --attention-dropout 0 --hidden-dropout 0"
)
UNTIED = "--untie-embeddings-and-output-weights --clip-grad 0"
DPP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-dpp"
TOLERANCE = 2e-5


def trained(flags: str, seed: int | None = None) -> Figures | None:
    """Losses and gradient norms of a run, on the reporting rank; with a seed, inputs of MegaDPP's tasks are late."""
    run = small_training.prepare(f"{MODEL} {flags}")
    if seed is not None:
        late_inputs.install(seed + run.layout.rank)
    recorder = small_training.train(run)
    return None if recorder is None else (recorder.losses, recorder.grad_norms)


def figures_of(run_ranks: RunRanks, world: int, flags: str, seed: int | None = None) -> Figures:
    (found,) = [result for result in run_ranks(world, trained, flags, seed) if result is not None]
    losses, norms = found
    return losses, norms


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> Callable[[str], Figures]:
    """Figures of one process, once for each set of flags."""
    return functools.cache(functools.partial(figures_of, run_ranks, 1))


def plainly_trained(flags: str) -> Figures:
    """The same as `trained`, of a loop in plain torch that begins with the same weights."""
    import torch
    from plain_bert import PlainBert

    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(f"{MODEL} {flags}")
    batches = build_iterators(run.config, run.layout, 0).train
    (chunk,) = run.state.chunks
    weights = {
        name.removeprefix("module."): parameter.detach().clone().requires_grad_()
        for name, parameter in chunk.named_parameters()
    }
    model = PlainBert(layers=LAYERS, hidden=HIDDEN, heads=HEADS)
    groups = [
        {"params": [weight for weight in weights.values() if weight.ndim > 1], "weight_decay": 0.1},
        {"params": [weight for weight in weights.values() if weight.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    losses, norms = [], []
    for _ in range(STEPS):
        parts, sums, counts, orders = [], [], [], []
        for batch in (next(batches) for _ in range(4)):
            token_losses, order = model.losses(weights, batch)
            masked = batch["loss_mask"].sum()
            sums.append((token_losses * batch["loss_mask"]).sum())
            counts.append(masked)
            orders.append(order.mean())
            parts.append(sums[-1] / masked.clamp(min=1) + orders[-1])
        optimizer.zero_grad()
        torch.stack(parts).mean().backward()  # type: ignore[no-untyped-call] # of torch
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.6)))
        losses.append(float(torch.stack(sums).sum() / torch.stack(counts).sum() + torch.stack(orders).mean()))
        optimizer.step()
    return losses, norms


@pytest.mark.full("two kinds of output layers", but=("tied",))
@pytest.mark.parametrize(
    "flags", [pytest.param("", id="tied"), pytest.param("--untie-embeddings-and-output-weights", id="untied")]
)
def test_training_equals_plain_torch(run_ranks: RunRanks, alone: Callable[[str], Figures], flags: str) -> None:
    (plain,) = run_ranks(1, plainly_trained, flags)
    losses, norms = plain
    assert min(norms) > 0.6, "nothing is clipped"
    assert alone(flags)[0] == pytest.approx(losses, rel=TOLERANCE)
    assert alone(flags)[1] == pytest.approx(norms, rel=1e-4)


SPLIT = {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "TP2xPP2+SP": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    "DP2-overlap": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "PP2xDP2": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
    "full-recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "selective-recompute": (1, "--recompute-activations"),
    "local-layers": (1, "--transformer-impl local"),
    "DPP": (2, DPP),
}


@pytest.mark.full("a sweep of layouts", but=("TP2xPP2+SP", "DP2-overlap", "local-layers"))
@pytest.mark.parametrize(("world", "layout"), SPLIT.values(), ids=list(SPLIT))
def test_layouts_agree_with_a_single_process(
    run_ranks: RunRanks, alone: Callable[[str], Figures], world: int, layout: str
) -> None:
    losses, norms = figures_of(run_ranks, world, layout)
    assert losses == pytest.approx(alone("")[0], rel=TOLERANCE)
    assert norms == pytest.approx(alone("")[1], rel=1e-3)


@pytest.mark.full("a sweep of schedules", but=("DPP",))
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--pipeline-model-parallel-size 2", id="PP2"),
        pytest.param("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", id="VPP"),
        pytest.param(DPP, id="DPP"),
        pytest.param(f"{DPP} --dpp-schedule zero-bubble --num-layers-per-virtual-pipeline-stage 2", id="DPP-split"),
    ],
)
def test_pipelines_are_bit_equal_to_a_single_process(
    run_ranks: RunRanks, alone: Callable[[str], Figures], layout: str
) -> None:
    losses, _ = figures_of(run_ranks, 2, f"{UNTIED} {layout}", 5 if "--use-dpp" in layout else None)
    assert len(losses) == STEPS
    assert losses == alone(UNTIED)[0]


def test_bf16_follows_fp32(run_ranks: RunRanks, alone: Callable[[str], Figures]) -> None:
    layout = f"{DPP} --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    losses, _ = figures_of(run_ranks, 4, f"--bf16 {layout}")
    assert losses == pytest.approx(alone("")[0], abs=0.05)
    assert losses != alone("")[0]
