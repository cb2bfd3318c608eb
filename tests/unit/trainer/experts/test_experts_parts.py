"""Parts of mixtures of experts: grouped products, collectives over uneven parts, and the figures of a step."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_trainer.models.experts.statistics import ExpertStatistics
from megatronapp_trainer.training.metrics import expert_events, experts_line

RunRanks = Callable[..., list[Any]]


@settings(max_examples=12)
@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_the_fused_product_equals_the_loop(counts: list[int], seed: int) -> None:
    """With gradients, in bf16, on the CPU's form of torch's kernel; groups may be empty."""
    import torch

    from megatronapp_trainer.models.experts.products import fused_product, product_in_loop

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(counts), 16, generator=generator).bfloat16()
    weight = torch.randn(len(counts), 24, 16, generator=generator).bfloat16()
    gradient = torch.randn(sum(counts), 24, generator=generator).bfloat16()
    if not sum(counts):
        return  # the CPU's form has no product without rows
    found = []
    for product in (fused_product, product_in_loop):
        inputs = [tensor.clone().requires_grad_() for tensor in (rows, weight)]
        output = product(inputs[0], inputs[1], torch.tensor(counts))
        torch.autograd.backward(output, gradient)
        found.append([output.detach(), *(tensor.grad for tensor in inputs)])
    for fused, loop in zip(*found, strict=True):
        torch.testing.assert_close(fused, loop, rtol=2e-2, atol=2e-2)


@pytest.mark.torch
def test_uneven_parts_are_gathered_and_scattered(run_ranks: RunRanks) -> None:
    assert run_ranks(2, exchanged) == [True, True]


def exchanged() -> bool:
    """Gather and scatter parts of 3 rows and of 1 row."""
    import torch
    import torch.distributed as dist

    from megatronapp_trainer.models.experts.uneven_collectives import gather_uneven, reduce_scatter_uneven

    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    sizes = [3, 1]
    whole = torch.arange(8.0).view(4, 2)
    gathered = gather_uneven(torch.split(whole, sizes)[rank], sizes, group)
    scattered = reduce_scatter_uneven(whole * (rank + 1), sizes, group)
    dist.destroy_process_group()
    return torch.equal(gathered, whole) and torch.equal(scattered, 3 * torch.split(whole, sizes)[rank])


STATISTICS = ExpertStatistics(losses={"load_balancing_loss": 1.5}, layers=(1, 3), load=((2, 6), (4, 4)), dropped=0.125)


def test_the_line_names_the_fullest_and_the_emptiest_expert() -> None:
    assert experts_line(STATISTICS) == (
        "fullest expert: 1.50 x mean load (layer 1, expert 1) | emptiest expert: 0.50 x mean load (layer 1, expert 0) "
        "| dropped: 12.5 % |"
    )


def test_events_have_the_fraction_of_each_expert() -> None:
    assert expert_events(STATISTICS) == {
        "moe/layer 1/expert 0": 0.25,
        "moe/layer 1/expert 1": 0.75,
        "moe/layer 3/expert 0": 0.5,
        "moe/layer 3/expert 1": 0.5,
        "moe/load imbalance": 1.5,
        "moe/dropped": 0.125,
    }
