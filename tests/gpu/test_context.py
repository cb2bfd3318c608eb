"""Attention over divided sequences and packed documents on devices: flash attention by blocks, rings, documents."""

from collections.abc import Callable
from typing import Any

import pytest
from device_training import losses_of, train

RunRanks = Callable[..., list[Any]]
CP2 = "--context-parallel-size 2 --use-distributed-optimizer"


def block_differences(is_causal: bool) -> list[float]:
    """Largest differences between flash attention of a block, and of its gradients, and the plain formula."""
    import torch

    from megatronapp_trainer.models.context import blocks
    from megatronapp_trainer.models.packed_documents import has_flash

    torch.manual_seed(1)
    query, gradient = torch.randn(2, 2, 96, 4, 64, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, 96, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert has_flash(query)
    merged = blocks.attend(query, key, value, scale=0.125, is_causal=is_causal)
    found = blocks.attend_backward(gradient, query, key, value, merged, scale=0.125, is_causal=is_causal)
    first, second, third = (part.float().requires_grad_() for part in (query, key, value))
    heads = [part.repeat_interleave(4 // part.size(2), 2).transpose(1, 2) for part in (first, second, third)]
    scores = heads[0] @ heads[1].transpose(-1, -2) * 0.125
    if is_causal:
        scores = scores.masked_fill(torch.ones(96, 96, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    context = (scores.softmax(-1) @ heads[2]).transpose(1, 2)
    gradients = torch.autograd.grad(context, (first, second, third), gradient.float())
    expected = (context, scores.logsumexp(-1).transpose(1, 2), *gradients)
    pairs = zip((*merged, *found), expected, strict=True)
    return [float((ours.float() - theirs).abs().max()) for ours, theirs in pairs]


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_flash_attention_are_those_of_the_formula(run_ranks: RunRanks, is_causal: bool) -> None:
    (differences,) = run_ranks(1, block_differences, is_causal)
    assert max(differences) < 0.05


def document_differences(window: int | None) -> list[float]:
    """Largest differences of packed attention, and of its gradients, between flash attention and single documents."""
    import torch

    from megatronapp_trainer.models.packed_documents import packed_attention

    torch.manual_seed(1)
    bounds = torch.tensor([0, 5, 60, 61, 128], dtype=torch.int32)
    inputs = [torch.randn(128, heads, 64, device="cuda") for heads in (4, 2, 2)]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        own = [part.to(torch.bfloat16).to(dtype).requires_grad_() for part in inputs]
        found = packed_attention(own[0], own[1], own[2], bounds, scale=0.125, dropout=0.0, window=window)
        results.append([found, *torch.autograd.grad(found.float().square().sum(), own)])
    return [float((ours.float() - theirs).abs().max()) for ours, theirs in zip(*results, strict=True)]


@pytest.mark.parametrize("window", [None, 7])
def test_packed_documents_are_as_single_documents(run_ranks: RunRanks, window: int | None) -> None:
    (differences,) = run_ranks(1, document_differences, window)
    assert max(differences) < 0.1


@pytest.mark.gpus(2)
@pytest.mark.parametrize("exchange", ["p2p", "a2a"])
@pytest.mark.parametrize(("precision", "tolerance"), [("", 1e-3), ("--bf16", 0.03)])
def test_two_devices_train_as_a_single_device(
    run_ranks: RunRanks, exchange: str, precision: str, tolerance: float
) -> None:
    pair = run_ranks(2, train, f"{precision} {CP2} --cp-comm-type {exchange}")
    assert losses_of(pair) == pytest.approx(losses_of(run_ranks(1, train, precision)), abs=tolerance)
