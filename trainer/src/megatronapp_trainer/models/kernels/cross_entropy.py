"""Cross entropy over a vocabulary that tensor ranks share: one pass over the logits forward, one backward.

R rows (tokens), V columns (the part of the vocabulary of this rank). The sum of exponentials is kept with a running
maximum (online softmax, arXiv 1805.02867); nothing of the size of the logits is stored but their gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _loss_row_sums(
    logits, labels, highest_out, total_out, target_out, columns: tl.constexpr, first, BLOCK: tl.constexpr
):
    """Store the largest logit of a row, the sum of exp(logit - largest), and the label's logit, 0 on other ranks."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * columns
    highest = float("-inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(base + places, mask=places < columns, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp(highest - larger) + tl.sum(tl.exp(values - larger), 0)
        highest = larger
    label = tl.load(labels + row) - first
    here = (label >= 0) & (label < columns)
    target = tl.load(base + label, mask=here, other=0.0).to(tl.float32)
    tl.store(highest_out + row, highest)
    tl.store(total_out + row, total)
    tl.store(target_out + row, target)


@triton.jit
def _loss_gradients(logits, labels, log_sums, scales, result, columns, first, BLOCK: tl.constexpr):
    """Store for BLOCK columns of a row (softmax - 1 at the label) times the gradient of the row's loss."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < columns
    values = tl.load(logits + row * columns + places, mask=inside, other=0.0).to(tl.float32)
    label = tl.load(labels + row) - first
    probability = tl.exp(values - tl.load(log_sums + row))
    probability = tl.where(places == label, probability - 1.0, probability) * tl.load(scales + row)
    tl.store(result + row * columns + places, probability.to(result.dtype.element_ty), mask=inside)


def row_losses(
    logits: torch.Tensor, labels: torch.Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row and the logarithm of its sum of exponentials, both fp32 [R].

    `logits` [R, V] of the columns from `first` on, `labels` int64 [R]; `group`: ranks with the other columns.
    """
    rows, columns = logits.shape
    highest, total, target = sums = logits.new_empty((3, rows), dtype=torch.float32)
    _loss_row_sums[(rows,)](logits, labels, highest, total, target, columns, first, BLOCK=_BLOCK, num_warps=8)
    if group is not None:
        own = highest.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        total.mul_(torch.exp(own - highest))
        dist.all_reduce(sums[1:], group=group)
    log_sums = total.log().add_(highest)
    return log_sums - target, log_sums


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        logits: torch.Tensor,
        labels: torch.Tensor,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        losses, log_sums = row_losses(logits, labels, first, group)
        ctx.save_for_backward(logits, labels, log_sums)
        ctx.first = first
        return losses

    @staticmethod
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        logits, labels, log_sums = ctx.saved_tensors
        result = torch.empty_like(logits)
        rows, columns = logits.shape
        grid = (rows, triton.cdiv(columns, _BLOCK))
        scales = loss_gradient.float().contiguous()
        _loss_gradients[grid](logits, labels, log_sums, scales, result, columns, ctx.first, BLOCK=_BLOCK, num_warps=8)
        return result, None, None, None


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, first: int = 0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the loss of each token in fp32, from logits [.., V] and labels int64 [..], as megatron-core computes it.

    Args:
        logits: in any precision; those of the columns from `first` on.
        labels: columns of the whole vocabulary.
        first: of this rank's columns.
        group: ranks that hold the other columns; None if all are here.
    """
    rows = logits.contiguous().view(-1, logits.size(-1))
    losses: torch.Tensor = _CrossEntropy.apply(rows, labels.reshape(-1).contiguous(), first, group)
    return losses.view(labels.shape)
