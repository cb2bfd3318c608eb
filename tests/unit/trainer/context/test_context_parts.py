"""Parts of attention over divided sequences: the division, blocks and their merging, both ways of exchange."""

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]


@given(size=st.integers(1, 8), chunk=st.integers(1, 5))
def test_a_division_is_balanced_and_whole(size: int, chunk: int) -> None:
    import torch

    from megatronapp_trainer.parallel.sequence import part_of_rank, parts_of_ranks, whole_sequence

    length = 2 * size * chunk
    positions = torch.arange(length)
    parts = [part_of_rank(positions, 0, rank=rank, size=size) for rank in range(size)]
    seen = {int((part + 1).sum()) for part in parts}
    assert seen == {length * (length + 1) // 2 // size}, "ranks see different numbers of pairs"
    assert torch.equal(whole_sequence(torch.stack(parts)), positions)
    assert torch.equal(parts_of_ranks(positions, size), torch.stack(parts))


@given(size=st.integers(1, 5), chunk=st.integers(1, 3))
def test_each_visible_pair_is_in_a_single_block(size: int, chunk: int) -> None:
    import torch

    from megatronapp_trainer.models.context.visible_blocks import visible_blocks
    from megatronapp_trainer.parallel.sequence import part_of_rank

    positions = torch.arange(2 * size * chunk)
    parts = [part_of_rank(positions, 0, rank=rank, size=size)[None] for rank in range(size)]
    counts = torch.zeros(len(positions), len(positions), dtype=torch.int)
    for rank in range(size):
        for source in range(size):
            for block in visible_blocks(rank, source, size, 2 * chunk):
                queries, keys = block.of_queries(parts[rank])[0], block.of_keys(parts[source])[0]
                seen = torch.ones(len(queries), len(keys), dtype=torch.int)
                counts[queries[:, None], keys] += seen.tril() if block.is_causal else seen
    assert torch.equal(counts, torch.ones_like(counts).tril())


@given(
    size=st.integers(1, 4),
    chunk=st.integers(1, 3),
    ends=st.lists(st.lists(st.booleans(), min_size=24, max_size=24), min_size=1, max_size=2),
)
def test_each_visible_pair_of_a_document_is_in_a_single_block(size: int, chunk: int, ends: list[list[bool]]) -> None:
    import torch

    from megatronapp_trainer.models.context.visible_blocks import blocks_of_documents
    from megatronapp_trainer.models.packed_documents import document_bounds, document_mask
    from megatronapp_trainer.parallel.sequence import part_of_rank

    length = 2 * size * chunk
    places = torch.arange(length)
    begins = torch.tensor([[True, *sample[: length - 1]] for sample in ends])
    positions = places - torch.where(begins, places, 0).cummax(1).values
    bounds = document_bounds(positions).tolist()
    parts = [part_of_rank(places, 0, rank=rank, size=size) for rank in range(size)]
    counts = torch.zeros(len(ends), length, length, dtype=torch.int)
    for rank in range(size):
        for source in range(size):
            for block in blocks_of_documents(rank, source, size, 2 * chunk, bounds):
                queries, keys = parts[rank][block.queries], parts[source][block.keys]
                seen = torch.ones(len(queries), len(keys), dtype=torch.int)
                counts[block.samples.start, queries[:, None], keys] += seen.tril() if block.is_causal else seen
    assert torch.equal(counts, (~document_mask(positions)[:, 0]).int())


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), ends=st.lists(st.integers(1, 11), min_size=1, max_size=3, unique=True))
def test_merged_blocks_are_the_attention_to_all_keys(seed: int, ends: list[int]) -> None:
    import torch

    from megatronapp_trainer.models.context.blocks import BlockOutput, attend, attend_backward, merge

    torch.manual_seed(seed)
    query = torch.randn(2, 5, 4, 8)
    key, value = torch.randn(2, 2, 12, 2, 8)
    gradient = torch.randn_like(query)
    merged = BlockOutput(torch.zeros_like(query), torch.full((2, 5, 4), -math.inf))
    bounds = [0, *sorted(ends), 12]
    blocks = [slice(first, last) for first, last in itertools.pairwise(bounds)]
    for block in blocks:
        merge(merged, attend(query, key[:, block], value[:, block], scale=0.3, is_causal=False))
    inputs = [part.requires_grad_() for part in (query, key, value)]
    expected = plain_attention(*inputs, scale=0.3, is_causal=False)
    torch.testing.assert_close(merged.context, expected, rtol=1e-5, atol=1e-6)
    expected.backward(gradient)
    of_query = torch.zeros_like(query)
    for block in blocks:
        found = attend_backward(
            gradient,
            query.detach(),
            key[:, block].detach(),
            value[:, block].detach(),
            merged,
            scale=0.3,
            is_causal=False,
        )
        of_query += found.query
        torch.testing.assert_close(found.key, key.grad[:, block], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.value, value.grad[:, block], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(of_query, query.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_plain_formula_is_the_fused_attention(is_causal: bool) -> None:
    """GPUs compute fp32 by the formula, which processors do not."""
    import torch

    from megatronapp_trainer.models.context import blocks

    torch.manual_seed(1)
    query, key, value, gradient = torch.randn(4, 2, 6, 4, 8)
    merged = blocks.attend(query, key, value, scale=0.3, is_causal=is_causal)
    fused = blocks.attend_backward(gradient, query, key, value, merged, scale=0.3, is_causal=is_causal)
    first, second, third = (part.transpose(1, 2) for part in (query, key, value))
    context, log_sum = blocks._plain(first, second, third, scale=0.3, is_causal=is_causal)
    torch.testing.assert_close(context.transpose(1, 2), merged.context)
    torch.testing.assert_close(log_sum.transpose(1, 2), merged.log_sum)
    output = blocks.BlockOutput(context, log_sum)
    gradient = gradient.transpose(1, 2)
    plain = blocks._plain_backward(gradient, first, second, third, output, scale=0.3, is_causal=is_causal)
    for ours, theirs in zip(plain, fused, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_attention_takes_and_gives_the_shapes_of_blocks(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory, as there is no GPU: operators check shapes and types alike."""
    import torch

    from megatronapp_trainer.models.context import blocks

    monkeypatch.setattr(blocks, "has_flash", lambda _query: True)
    query, gradient = (torch.empty(2, 6, 4, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))
    key, value = (torch.empty(2, 6, 2, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))
    merged = blocks.attend(query, key, value, scale=0.3, is_causal=is_causal)
    assert (merged.context.shape, merged.log_sum.shape) == (query.shape, query.shape[:3])
    assert merged.log_sum.dtype == torch.float32
    found = blocks.attend_backward(gradient, query, key, value, merged, scale=0.3, is_causal=is_causal)
    assert [part.shape for part in found] == [query.shape, key.shape, value.shape]


def plain_attention(query: Any, key: Any, value: Any, *, scale: float, is_causal: bool) -> Any:
    """The formula on [B, L, H, D], differentiable by autograd."""
    import torch

    times = query.size(2) // key.size(2)
    key, value = (part.repeat_interleave(times, 2) for part in (key, value))
    scores = torch.einsum("blhd,bkhd->bhlk", query, key) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhlk,bkhd->blhd", scores.softmax(-1), value)


def _gradient(tensor: Any) -> Any:
    return tensor.grad


def attention_of_ranks(exchange: str, dtype_name: str) -> tuple[float, float]:
    """Largest differences of output and gradients from plain attention over the whole sequence, on this rank."""
    import small_training
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatronapp_trainer.models.layers import _context_attention
    from megatronapp_trainer.parallel.sequence import part_of_rank

    size = int(os.environ["WORLD_SIZE"])
    run = small_training.prepare(
        "--num-layers 1 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
        f"--seq-length {8 * size} --micro-batch-size 2 --train-iters 1 --lr 1 --mock-data --vocab-size 60 "
        f"--attention-dropout 0 --eval-iters 0 --context-parallel-size {size} --cp-comm-type {exchange}"
    )
    rank, dtype = parallel_state.get_context_parallel_rank(), getattr(torch, dtype_name)
    tokens = torch.arange(2 * 8 * size).view(2, -1)
    theirs = get_batch_on_this_cp_rank({"tokens": tokens})["tokens"]
    assert torch.equal(part_of_rank(tokens, 1, rank=rank, size=size), theirs), "Megatron divides otherwise"
    torch.manual_seed(7)
    query, gradient = torch.randn(2, 8 * size, 2, 8, 8)
    key, value = torch.randn(2, 8 * size, 2, 4, 8)
    whole = [part.clone().requires_grad_() for part in (query, key, value)]
    expected = plain_attention(*(part.transpose(0, 1) for part in whole), scale=8**-0.5, is_causal=True).transpose(0, 1)
    expected.backward(gradient)
    options = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    attention = _context_attention(exchange)(run.core_config, **options, pg_collection=groups)
    own = [part_of_rank(part, 0, rank=rank, size=size).to(dtype).requires_grad_() for part in (query, key, value)]
    found = attention(*own, None)
    found.backward(part_of_rank(gradient, 0, rank=rank, size=size).flatten(2).to(dtype))
    difference = found - part_of_rank(expected, 0, rank=rank, size=size).flatten(2)
    gradients = [
        (_gradient(ours) - part_of_rank(_gradient(theirs), 0, rank=rank, size=size)).abs().max().item()
        for ours, theirs in zip(own, whole, strict=True)
    ]
    return difference.abs().max().item(), max(gradients)


@pytest.mark.full("a sweep of sizes and precisions", but=("fp32-3-p2p",))
@pytest.mark.parametrize(
    ("exchange", "world", "dtype", "tolerance"),
    [
        pytest.param("p2p", 2, "float32", 5e-6, id="fp32-2-p2p"),
        pytest.param("p2p", 3, "float32", 5e-6, id="fp32-3-p2p"),
        pytest.param("p2p", 4, "bfloat16", 5e-2, id="bf16-4-p2p"),
        pytest.param("a2a", 2, "float32", 5e-6, id="fp32-2-a2a"),
        pytest.param("a2a", 4, "bfloat16", 5e-2, id="bf16-4-a2a"),
    ],
)
def test_ranks_attend_to_whole_sequences(
    run_ranks: RunRanks, exchange: str, world: int, dtype: str, tolerance: float
) -> None:
    for output, gradients in run_ranks(world, attention_of_ranks, exchange, dtype):
        assert output < tolerance
        assert gradients < tolerance
