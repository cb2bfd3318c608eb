"""Measures of compared rows on a GPU, one kernel each; `shard_divergence` and `change_of` have the rules in torch.

Shapes: V the part of the vocabulary, P the blocks that it is split into, D channels.
"""

import torch
import triton
import triton.language as tl

_SIZE = 1024


@triton.jit(do_not_specialize=["first", "count"])  # type: ignore[untyped-decorator] # untyped library
def _divergence(  # type: ignore[no-untyped-def] # types are the compiler's
    reference, logits, token, out, first, count, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    place_S = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = place_S < count
    a_S = tl.load(reference + place_S, mask=inside, other=float("-inf")).to(tl.float64)
    b_S = tl.load(logits + first + place_S, mask=inside, other=float("-inf")).to(tl.float64)
    chosen = tl.load(token)
    token_b = tl.load(logits + chosen).to(tl.float64)
    peak_a, peak_b = tl.max(a_S, 0), tl.max(b_S, 0)
    weight_S = tl.where(inside, tl.exp(a_S - peak_a), 0.0)
    here = out + tl.program_id(0) * COLUMNS
    is_token = inside & (first + place_S == chosen)
    tl.store(here, peak_a)
    tl.store(here + 1, tl.sum(weight_S, 0))
    apart_S = tl.where(inside, a_S, 0.0) - tl.where(inside, b_S, 0.0)
    tl.store(here + 2, tl.sum(weight_S * apart_S, 0))
    tl.store(here + 3, peak_b)
    tl.store(here + 4, tl.sum(tl.where(inside, tl.exp(b_S - peak_b), 0.0), 0))
    tl.store(here + 5, tl.sum((inside & (b_S > token_b)).to(tl.int32), 0).to(tl.float64))
    tl.store(here + 6, tl.sum(tl.where(is_token, a_S, 0.0), 0))
    tl.store(here + 7, tl.sum(tl.where(is_token, b_S, 0.0), 0))


@triton.jit  # type: ignore[untyped-decorator] # untyped library
def _change(  # type: ignore[no-untyped-def] # types are the compiler's
    reference, values, out, heads, layer_stride, head_stride, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = values + row // heads * layer_stride + row % heads * head_stride
    change_S = tl.zeros([SIZE], tl.float32)
    length_S = tl.zeros([SIZE], tl.float32)
    for start in range(0, CHANNELS, SIZE):
        place_S = start + tl.arange(0, SIZE)
        inside = place_S < CHANNELS
        of_reference = tl.load(reference + row * CHANNELS + place_S, mask=inside, other=0.0).to(tl.float32)
        of_values = tl.load(begin + place_S, mask=inside, other=0.0).to(tl.float32)
        change_S += (of_values - of_reference) * (of_values - of_reference)
        length_S += of_reference * of_reference
    tl.store(out + row, tl.sqrt(tl.sum(change_S, 0)) / tl.sqrt(tl.sum(length_S, 0)))


def divergence(
    reference_V: torch.Tensor, logits: torch.Tensor, first: int, token_1: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return fp64 [P, columns] of a part of the vocabulary that begins at `first` and is not empty.

    `reference_V`: its logits of the reference; `logits`: one row of the whole vocabulary; `token_1`: the token, int64.
    """
    count = reference_V.numel()
    blocks = triton.cdiv(count, _SIZE)
    out = torch.empty(blocks, columns, dtype=torch.float64, device=logits.device)
    _divergence[(blocks,)](reference_V, logits, token_1, out, first, count, COLUMNS=columns, SIZE=_SIZE)
    return out


def change(reference: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return fp32 [layers] or [layers, heads] from numbers [layers, D] or [layers, heads, D], D contiguous.

    `reference` is contiguous.
    """
    out = torch.empty(values.shape[:-1], device=values.device)
    channels, heads = values.size(-1), 1 if values.dim() == 2 else values.size(1)
    _change[(out.numel(),)](
        reference, values, out, heads, values.stride(0), values.stride(-2),
        CHANNELS=channels, SIZE=min(triton.next_power_of_2(channels), _SIZE),
    )  # fmt: skip
    return out
