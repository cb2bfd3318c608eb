"""Causal attention within the documents of packed samples, without a mask of all pairs of tokens.

Documents are given by the bounds between them (`cu_seqlens`): int32 [N + 1] on the host, where the tokens of all
samples are in a row; the first is 0, the last the number of tokens, and no document is of two samples.

Shapes: T tokens of all samples, H query heads, G key heads, D channels of a head.
"""

import functools
import itertools

import torch

from megatronapp_trainer.models.masks import causal_mask


def has_flash(query: torch.Tensor) -> bool:
    """Return whether torch's flash attention takes queries [..., D]."""
    width = query.size(-1)
    is_half = query.dtype in {torch.bfloat16, torch.float16}
    return query.is_cuda and is_half and width <= 256 and width % 8 == 0 and _runs_flash(query.device)


@functools.cache
def _runs_flash(device: torch.device) -> bool:
    """Return whether FlashAttention 2 was built into torch, and has kernels for a device: of Ampere and later."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def document_bounds(positions: torch.Tensor) -> torch.Tensor:
    """Return the bounds of documents from the positions [B, S] on the host, which begin at 0 in each document."""
    firsts = (positions.flatten() == 0).nonzero().flatten()
    return torch.cat((firsts, torch.tensor([positions.numel()]))).to(torch.int32)


def document_mask(positions: torch.Tensor) -> torch.Tensor:
    """Return the same as a mask [B, 1, S, S], true where a token is hidden from another."""
    places = torch.arange(positions.size(1), device=positions.device)
    starts = places - positions
    return ((places < starts.unsqueeze(-1)) | (places > places.unsqueeze(-1))).unsqueeze(1)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    *,
    scale: float,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """Compute query [T, H, D], key and value [T, G, D] -> [T, H, D].

    `window`: previous tokens that a token attends to; None: all of its document. On GPUs in half precision all
    documents are one launch of flash attention, elsewhere each is a launch.
    """
    if has_flash(query):
        offsets, longest = bounds.to(query.device, non_blocking=True), int(bounds.diff().max())
        options = {"scale": scale, "window_size_left": window, "window_size_right": None if window is None else 0}
        found: torch.Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, offsets, offsets, longest, longest, dropout, True, False, **options
        )[0]
        return found
    parts = [
        _attention(query[first:last], key[first:last], value[first:last], scale=scale, dropout=dropout, window=window)
        for first, last in itertools.pairwise(bounds.tolist())
    ]
    return torch.cat(parts)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, dropout: float, window: int | None
) -> torch.Tensor:
    """Return the attention of a single document."""
    length, mask = query.size(0), None
    if window is not None and window < length - 1:
        mask = causal_mask(length, query.device, window=(window, 0)).logical_not()
    context = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=key.size(1) != query.size(1),
    )
    return context[0].transpose(0, 1)
