"""Samples with unequal numbers of tokens train alike over replicas and stages, by either weighting."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_training

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-2 --eval-iters 0 --attention-dropout 0 "
    "--hidden-dropout 0"
)
TOKENS = (16, 1, 0, 9, 3, 14, 2, 16)
"""Unmasked tokens of each sample in turn."""
PER_TOKEN = "--calculate-per-token-loss"
TOLERANCE = 1e-5


def uneven(batches: Iterator[Any], replica: int, replicas: int) -> Iterator[Any]:
    """The same batches with masks of TOKENS ones."""
    import torch

    sample = replica
    for batch in batches:
        order = torch.randperm(16, generator=torch.Generator().manual_seed(sample))
        mask = torch.zeros(16)
        mask[order[: TOKENS[sample % len(TOKENS)]]] = 1
        batch["loss_mask"] = mask[None]
        sample += replicas
        yield batch


def train(flags: str) -> list[tuple[float, float]] | None:
    """Loss and gradient norm of each step, on the reporting rank."""
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(f"{MODEL} {flags}")
    layout = run.layout
    masked = uneven(build_iterators(run.config, layout, 0).train, layout.data_rank, layout.data_size)
    recorder = small_training.train(run, iterators=DataIterators(train=masked, valid=None, test=None))
    return None if recorder is None else list(zip(recorder.losses, recorder.grad_norms, strict=True))


def values_of(run_ranks: RunRanks, world: int, flags: str) -> list[float]:
    (values,) = [values for values in run_ranks(world, train, flags) if values is not None]
    return [number for step in values for number in step]


@pytest.mark.parametrize("weighting", [pytest.param(PER_TOKEN, id="per-token"), pytest.param("", id="per-microbatch")])
def test_unequal_tokens_train_alike(run_ranks: RunRanks, weighting: str) -> None:
    alone = values_of(run_ranks, 1, weighting)
    assert len(alone) == 8
    for layout in (
        "",
        "--use-distributed-optimizer --overlap-grad-reduce",
        "--pipeline-model-parallel-size 2",
    ):
        assert values_of(run_ranks, 2, f"{weighting} {layout}") == pytest.approx(alone, rel=TOLERANCE), layout


def test_the_two_weightings_differ_where_tokens_do(run_ranks: RunRanks) -> None:
    """Check that the test above would notice one in place of the other."""
    (first, norm, *_), (other, other_norm, *_) = (values_of(run_ranks, 1, flags) for flags in (PER_TOKEN, ""))
    assert first == pytest.approx(other)
    assert norm != pytest.approx(other_norm, rel=1e-3)
