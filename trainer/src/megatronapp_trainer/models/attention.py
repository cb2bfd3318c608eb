"""Core attention on torch's fused scaled_dot_product_attention, a drop-in for megatron-core's DotProductAttention.

Shapes: S sequence, B microbatch, H query heads of this rank, G key heads of this rank, D channels of a head.
"""

import contextlib
import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule

from megatronapp_trainer.models.masks import causal_mask
from megatronapp_trainer.models.packed_documents import packed_attention


class TorchAttention(MegatronModule):  # type: ignore[misc] # megatron-core carries no types
    """Causal attention without a mask tensor, or attention under a given mask.

    A window (``config.window_size``) narrows both. A sequence within the window needs no mask tensor for it.

    Dropout draws from Megatron's tracker of tensor-parallel states, as heads differ between the ranks of a tensor
    group; under sequence parallelism the whole layer already runs in that state.
    """

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - TransformerConfig
        *,
        layer_number: int,
        attn_mask_type: Any,  # noqa: ANN401 - AttnMaskType
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any | None = None,  # noqa: ANN401 - ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._heads_per_key = config.num_attention_heads // config.num_query_groups

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: Any | None = None,  # noqa: ANN401 - AttnMaskType
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any | None = None,  # noqa: ANN401 - PackedSeqParams
    ) -> torch.Tensor:
        """Compute query [S, B, H, D], key and value [S, B, G, D], mask [B, 1, S, S] (true: masked) -> [S, B, HD].

        In the place of a mask it takes the bounds of packed documents (`models.packed_documents`).

        Raises ValueError for packed sequences or a bias, which this module does not support.
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("TorchAttention knows neither packed sequences nor an attention bias")
        if attention_mask is not None and attention_mask.dtype == torch.int32:
            return self._packed(query, key, value, attention_mask)
        hidden = self._hidden(attention_mask, query.size(0), query.device)
        if hidden is not None and self._heads_per_key > 1:
            # On GPUs no kernel takes both a mask and groups but the one that keeps all scores, [B, H, S, S].
            key, value = (part.repeat_interleave(self._heads_per_key, dim=2) for part in (key, value))
        dropout = self._dropout if self.training else 0.0
        with self._rng(dropout):
            context_BHSD = torch.nn.functional.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=None if hidden is None else hidden.logical_not(),
                dropout_p=dropout,
                is_causal=hidden is None,
                scale=self._scale,
                enable_gqa=hidden is None and self._heads_per_key > 1,
            )
        return context_BHSD.permute(2, 0, 1, 3).flatten(2)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        samples, window = query.size(1), self.config.window_size
        dropout = self._dropout if self.training else 0.0
        rows = [part.transpose(0, 1).flatten(0, 1) for part in (query, key, value)]
        with self._rng(dropout):
            context_THD = packed_attention(
                rows[0],
                rows[1],
                rows[2],
                bounds,
                scale=self._scale,
                dropout=dropout,
                window=None if window is None else window[0],
            )
        return context_THD.reshape(samples, query.size(0), -1).transpose(0, 1)

    def _hidden(self, mask: torch.Tensor | None, length: int, device: torch.device) -> torch.Tensor | None:
        """Return the mask combined with the window; None if causality is enough."""
        window = self.config.window_size
        if window is None or window[0] >= length - 1:
            return mask
        outside = causal_mask(length, device, window=window)
        return outside if mask is None else mask | outside

    def _rng(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        forked: contextlib.AbstractContextManager[Any] = tensor_parallel.get_cuda_rng_tracker().fork()
        return forked
