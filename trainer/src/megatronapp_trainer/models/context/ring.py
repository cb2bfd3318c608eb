"""Attention of a context group by passing keys and values around a ring (`--cp-comm-type p2p`).

In each of N steps a rank computes the attention of its queries to the keys of another rank, and passes them on to the
next rank meanwhile. Each rank holds an early and a late chunk of the sequence (`parallel.sequence`), so that in every
step but the first half of the pairs of chunks are visible, on each rank: of the keys of earlier ranks all of its
queries see the early chunk; those of later ranks its late queries alone see, all of them. In the backward pass keys
and values go around once more, and their gradients a step later. Algorithm: Liu et al., Ring Attention
(arXiv 2310.01889), with the balanced order of Megatron-LM.

Shapes: S sequence, N ranks of the context group, B microbatch, H query heads and G key heads of this tensor rank, D
channels of a head.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from megatronapp_trainer.models.context.blocks import BlockOutput, attend, attend_backward, merge
from megatronapp_trainer.models.context.visible_blocks import Block, blocks_of_documents, visible_blocks

_Options = tuple[dist.ProcessGroup, float, list[list[Block]]]
"""The ring, the factor of the scores, and the blocks of each step."""


class RingAttention(MegatronModule):  # type: ignore[misc] # megatron-core carries no types
    """Causal attention, without dropout and window, of tokens that are divided over a context group."""

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - TransformerConfig
        *,
        pg_collection: Any,  # noqa: ANN401 - ProcessGroupCollection
        softmax_scale: float | None = None,
        **_options: Any,  # noqa: ANN401 - what megatron-core gives besides
    ) -> None:
        super().__init__(config=config)
        self._group = pg_collection.cp
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_options: Any,  # noqa: ANN401 - what megatron-core takes besides
    ) -> torch.Tensor:
        """Compute query [S/N, B, H, D], key and value [S/N, B, G, D] -> [S/N, B, HD].

        In the place of a mask it takes the bounds of packed documents (`models.packed_documents`) of whole samples.
        """
        bounds = None if attention_mask is None else attention_mask.tolist()
        return ring_attention(query, key, value, self._group, scale=self._scale, bounds=bounds).flatten(2)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    scale: float,
    bounds: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the attention [S/N, B, H, D] of this rank's tokens to all that they see; differentiable.

    Takes query [S/N, B, H, D], key and value [S/N, B, G, D] of this rank's two chunks, and the bounds of documents
    where samples have several; collective over the group.
    """
    rank, size, length = group.rank(), group.size(), query.size(0)
    if bounds is None:
        steps = [visible_blocks(rank, (rank - step) % size, size, length) for step in range(size)]
    else:
        steps = [blocks_of_documents(rank, (rank - step) % size, size, length, bounds) for step in range(size)]
    context: torch.Tensor = _Ring.apply(query, key, value, (group, scale, steps))  # type: ignore[no-untyped-call] # of torch
    return context


class _Ring(torch.autograd.Function):
    """Attention and its gradients, each in a round of the ring."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: _Options,
    ) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        merged = _forward_round(query, key, value, options)
        context = merged.context.to(query.dtype)
        ctx.save_for_backward(query, key, value, context, merged.log_sum)
        ctx.options = options
        return context.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - autograd's
        query, key, value, context, log_sum = ctx.saved_tensors
        merged, gradient = BlockOutput(context, log_sum), gradients[0].transpose(0, 1)
        found = _backward_round(gradient, (query, key, value), merged, ctx.options)
        return (*(part.to(query.dtype).transpose(0, 1) for part in found), None)


def _forward_round(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options) -> BlockOutput:
    """Return the output [B, S/N, H, D] and its logarithms, both in fp32, from tensors with the samples first."""
    group, scale, steps = options
    merged = BlockOutput(
        torch.zeros_like(query, dtype=torch.float32),
        torch.full(query.shape[:-1], -math.inf, dtype=torch.float32, device=query.device),
    )
    pair = torch.stack((key, value))
    for number, blocks in enumerate(steps, 1):
        transfer = _Transfer(pair, group) if number < len(steps) else None
        for block in blocks:
            found = attend(
                block.of_queries(query),
                block.of_keys(pair[0]),
                block.of_keys(pair[1]),
                scale=scale,
                is_causal=block.is_causal,
            )
            merge(_of_queries(block, merged), found)
        if transfer is not None:
            pair = transfer.received()
    return merged


def _backward_round(
    gradient: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    merged: BlockOutput,
    options: _Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value of this rank, in fp32, with the samples first."""
    (query, key, value), (group, scale, steps) = inputs, options
    of_query = torch.zeros_like(query, dtype=torch.float32)
    pair = torch.stack((key, value))
    returning: _Transfer | None = None
    for number, blocks in enumerate(steps, 1):
        transfer = _Transfer(pair, group) if number < len(steps) else None
        of_pair = torch.zeros_like(pair, dtype=torch.float32)
        for block in blocks:
            found = attend_backward(
                block.of_queries(gradient),
                block.of_queries(query),
                block.of_keys(pair[0]),
                block.of_keys(pair[1]),
                _of_queries(block, merged),
                scale=scale,
                is_causal=block.is_causal,
            )
            block.of_queries(of_query).add_(found.query)
            block.of_keys(of_pair[0]).add_(found.key)
            block.of_keys(of_pair[1]).add_(found.value)
        if returning is not None:
            of_pair.add_(returning.received())
        # After the last step the gradients are a rank before the keys that they belong to.
        returning = _Transfer(of_pair, group)
        if transfer is not None:
            pair = transfer.received()
    assert returning is not None
    of_key, of_value = returning.received().unbind(0)
    return of_query, of_key, of_value


def _of_queries(block: Block, merged: BlockOutput) -> BlockOutput:
    return BlockOutput(block.of_queries(merged.context), block.of_queries(merged.log_sum))


class _Transfer:
    """A tensor on its way to the next rank, and that of the previous rank to this one."""

    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent = sent  # in use until it has left
        self._received = torch.empty_like(sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def received(self) -> torch.Tensor:
        """Return the tensor of the previous rank, when it is here and this rank's has left."""
        for work in self._works:
            work.wait()
        return self._received
