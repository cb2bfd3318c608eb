"""Attention of some queries to some keys, with what is needed to merge it with that to other keys.

On a GPU in half precision torch's flash attention computes a block, on a CPU its fused attention, elsewhere a plain
formula in fp32. Blocks of a softmax are merged by the logarithm of the sum of exponentials of their scores (Milakov and
Gimelshein, arXiv 1805.02867). The backward pass of a block takes output and logarithm of all blocks merged: the
probabilities that it computes again are then those of the whole softmax.

Shapes: B samples, L query tokens, K key tokens, H query heads, G key heads, D channels of a head.
"""

from typing import NamedTuple

import torch

from megatronapp_trainer.models.packed_documents import has_flash


class BlockOutput(NamedTuple):
    """Attention of some queries to some keys."""

    context: torch.Tensor
    """[B, L, H, D]"""
    log_sum: torch.Tensor
    """fp32 [B, L, H], logarithm of the sum of exponentials of the scores."""


class BlockGradients(NamedTuple):
    """Gradients of the queries, keys and values of a block."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, is_causal: bool
) -> BlockOutput:
    """Compute query [B, L, H, D], key and value [B, K, G, D]; causal blocks are square."""
    if has_flash(query):
        return _flash(query, key, value, scale=scale, is_causal=is_causal)
    key, value = (_repeated(part, query.size(2)) for part in (key, value))
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if query.is_cuda:
        context, log_sum = _plain(query, key, value, scale=scale, is_causal=is_causal)
    else:
        context, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
    return BlockOutput(context.transpose(1, 2), log_sum.transpose(1, 2))


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    merged: BlockOutput,
    *,
    scale: float,
    is_causal: bool,
) -> BlockGradients:
    """Return the gradients of a block from that of the merged output [B, L, H, D], and the output itself."""
    if has_flash(query):
        return _flash_backward(gradient, query, key, value, merged, scale=scale, is_causal=is_causal)
    groups = key.size(2)
    key, value = (_repeated(part, query.size(2)) for part in (key, value))
    parts = (gradient, query, key, value, *merged)
    gradient, query, key, value, context, log_sum = (part.transpose(1, 2) for part in parts)
    if query.is_cuda:
        of_query, of_key, of_value = _plain_backward(
            gradient, query, key, value, BlockOutput(context, log_sum), scale=scale, is_causal=is_causal
        )
    else:
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, context, log_sum, 0.0, is_causal, scale=scale
        )
    of_key, of_value = (_summed(part.transpose(1, 2), groups) for part in (of_key, of_value))
    return BlockGradients(of_query.transpose(1, 2), of_key, of_value)


def merge(into: BlockOutput, block: BlockOutput) -> None:
    """Add a block to what the same queries have attended to before, both in fp32, in place."""
    total = torch.logaddexp(into.log_sum, block.log_sum)
    into.context.mul_((into.log_sum - total).exp().unsqueeze(-1))
    into.context.add_(block.context * (block.log_sum - total).exp().unsqueeze(-1))
    into.log_sum.copy_(total)


def _repeated(part: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values [B, K, G, D] with a copy of its group for each of the query heads."""
    times = heads // part.size(2)
    return part if times == 1 else part.repeat_interleave(times, dim=2)


def _summed(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the gradient [B, K, G, D] of keys or values from that of their copies [B, K, H, D]."""
    samples, length, heads, width = gradient.shape
    return gradient.reshape(samples, length, groups, heads // groups, width).sum(3)


def _offsets(part: torch.Tensor) -> torch.Tensor:
    """Return where the samples of [B, L, ...] begin and end where they are one after another, int32 [B + 1]."""
    samples, length = part.shape[:2]
    return torch.arange(0, (samples + 1) * length, length, dtype=torch.int32, device=part.device)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, is_causal: bool
) -> BlockOutput:
    context, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        *(part.flatten(0, 1) for part in (query, key, value)),
        _offsets(query),
        _offsets(key),
        query.size(1),
        key.size(1),
        0.0,
        is_causal,
        False,
        scale=scale,
    )
    return BlockOutput(context.view(query.shape), log_sum.t().reshape(query.shape[:3]))


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    merged: BlockOutput,
    *,
    scale: float,
    is_causal: bool,
) -> BlockGradients:
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients = torch.ops.aten._flash_attention_backward(
        *(part.flatten(0, 1).contiguous() for part in (gradient, query, key, value, merged.context)),
        merged.log_sum.flatten(0, 1).t().contiguous(),
        _offsets(query),
        _offsets(key),
        query.size(1),
        key.size(1),
        0.0,
        is_causal,
        unused,
        unused,
        scale=scale,
    )
    return BlockGradients(*(part.view(kind.shape) for part, kind in zip(gradients, (query, key, value), strict=True)))


def _scores(query: torch.Tensor, key: torch.Tensor, *, scale: float, is_causal: bool) -> torch.Tensor:
    """Return scores in fp32 [B, H, L, K] of query [B, H, L, D] and key [B, H, K, D]."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, scale=scale, is_causal=is_causal)
    log_sum = scores.logsumexp(-1)
    return ((scores - log_sum.unsqueeze(-1)).exp_() @ value.float()).to(query.dtype), log_sum


def _plain_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    merged: BlockOutput,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, scale=scale, is_causal=is_causal)
    probabilities = (scores - merged.log_sum.unsqueeze(-1)).exp_()
    gradient = gradient.float()
    of_value = probabilities.transpose(-1, -2) @ gradient
    of_probabilities = gradient @ value.float().transpose(-1, -2)
    mean = (gradient * merged.context.float()).sum(-1, keepdim=True)
    of_scores = probabilities * (of_probabilities - mean) * scale
    of_query, of_key = of_scores @ key.float(), of_scores.transpose(-1, -2) @ query.float()
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
