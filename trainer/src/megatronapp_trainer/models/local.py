"""megatron-core's own core attention without its repeated work in every call, for ``--transformer-impl local``.

Without a mask tensor megatron-core 0.16 builds the causal one in every layer of every microbatch, and it writes the
mask into a view of the scores, for which autograd copies their whole gradient three times. Both cost the host more than
the kernels that they launch; the values are the same to the last bit.
"""

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatronapp_trainer.models.masks import causal_mask

_HIDDEN = -10000.0
"""Score of masked tokens, as in megatron-core."""


def masked(scores_BHSS: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Replace the scores of masked tokens; `mask` broadcasts over B and H."""
    return scores_BHSS.masked_fill(mask, _HIDDEN)


class LocalAttention(DotProductAttention):  # type: ignore[misc] # megatron-core carries no types
    """DotProductAttention with one causal mask for all layers, applied out of place; a window is part of that mask."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of megatron-core
        super().__init__(*args, **kwargs)
        self.scale_mask_softmax.mask_func = masked
        self.scale_mask_softmax.window_size = None  # it would take the place of our mask

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,  # noqa: ANN401 - what megatron-core takes besides
    ) -> torch.Tensor:
        """Compute query [S, B, H, D], key and value [S, B, G, D], mask [B, 1, S, S] (true: masked) -> [S, B, HD]."""
        mask = attention_mask
        if mask is None or self.config.window_size is not None:
            hidden = causal_mask(query.size(0), query.device, window=self.config.window_size)
            mask = hidden if mask is None else mask | hidden
        context: torch.Tensor = super().forward(query, key, value, mask, **options)
        return context
