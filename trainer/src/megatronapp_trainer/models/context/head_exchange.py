"""Attention of a context group by exchanging heads for tokens (Ulysses, `--cp-comm-type a2a`).

Before attention each rank sends the other heads of its tokens, and gets its own heads of all other tokens; afterwards
the outputs go the way back. The attention between is that of a single rank: over whole sequences, of fewer heads.
Algorithm: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).

Shapes: S sequence, N ranks of the context group, B microbatch, H query heads and G key heads of this tensor rank, D
channels of a head.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatronapp_trainer.models.attention import TorchAttention
from megatronapp_trainer.parallel.sequence import parts_of_ranks, whole_sequence


class HeadExchangeAttention(TorchAttention):
    """Attention whose tokens are divided over a context group before and after it, and whose heads are within it."""

    def __init__(self, config: Any, *, pg_collection: Any, **options: Any) -> None:  # noqa: ANN401 - those of megatron-core
        super().__init__(config, pg_collection=pg_collection, **options)
        self._group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,  # noqa: ANN401 - what megatron-core takes besides
    ) -> torch.Tensor:
        """Compute query [S/N, B, H, D], key and value [S/N, B, G, D] -> [S/N, B, HD]; a mask is of whole sequences."""
        size = self._group.size()
        heads, keys = query.size(2) // size, key.size(2) // size
        parts = [torch.stack(part.chunk(size, 2)) for part in (query, key, value)]
        whole = whole_sequence(exchange(torch.cat(parts, dim=3), self._group))
        query, key, value = whole[:, :, :heads], whole[:, :, heads : heads + keys], whole[:, :, heads + keys :]
        context = super().forward(query, key, value, attention_mask, **options).view(query.shape)
        returned = exchange(parts_of_ranks(context, size), self._group)
        return returned.permute(1, 2, 0, 3, 4).flatten(2)


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts, whose backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ANN401 - autograd's
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401 - autograd's
        return _all_to_all(gradients[0], ctx.group), None


def exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send part r of [N, ...] to rank r, and return the parts [N, ...] that the ranks have sent; differentiable."""
    received: torch.Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call] # of torch
    return received


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
