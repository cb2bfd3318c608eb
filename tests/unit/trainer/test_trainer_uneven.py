"""Samples with unequal numbers of tokens train alike over replicas and stages, by either weighting."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

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


class Recorder:
    """A reporter that keeps losses and norms."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, metrics: Any, **_details: object) -> None:
        self.values += [metrics.loss, metrics.grad_norm]

    def state(self, state: str) -> None:
        pass


def train(flags: str) -> list[float] | None:
    """Loss and gradient norm of each step, on the reporting rank."""
    warnings.simplefilter("ignore")
    from megatronapp_trainer.batch import DataIterators
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.loop import Trainer
    from megatronapp_trainer.setup import build_iterators, build_run, layout_of
    from megatronapp_trainer.signals import StopWish

    config = parse(f"{MODEL} {flags}".split())
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=64)
    masked = uneven(build_iterators(config, layout, 0).train, layout.data_rank, layout.data_size)
    recorder: Any = Recorder() if layout.is_reporter else None
    iterators = DataIterators(train=masked, valid=None, test=None)
    Trainer(run, iterators, stop_wish=StopWish(), reporter=recorder).train()
    destroy_groups()
    return recorder.values if recorder is not None else None


def values_of(run_ranks: RunRanks, world: int, flags: str) -> list[float]:
    (values,) = [values for values in run_ranks(world, train, flags) if values is not None]
    return list(values)


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
    """Else the test above would not see one taken for the other."""
    (first, norm, *_), (other, other_norm, *_) = (values_of(run_ranks, 1, flags) for flags in (PER_TOKEN, ""))
    assert first == pytest.approx(other)
    assert norm != pytest.approx(other_norm, rel=1e-3)
