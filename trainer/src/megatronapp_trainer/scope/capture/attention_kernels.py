"""Attention of a decode step computed again on a GPU, straight from the cache: keys are read once, where they lie.

`attention_recompute` is the same rule in plain torch, for any device and for prompts; it puts scores of all heads into
memory and transposes the cached keys first, which costs a decode step of a large batch more than its own attention.
Here a program reads the keys of one head group of one sequence with a running maximum and running sums (Milakov and
Gimelshein 2018), and keeps only the numbers that are reported of a head.

Shapes: L layers, B sequences, H query heads and G key heads of this rank, R = H / G, D channels, T keys, P pins.
"""

import torch
import triton
import triton.language as tl

from megatronapp_trainer.scope.capture.attention_recompute import AttentionRule

_BLOCK = 64
_LEAST_ROWS = 16
"""Smallest side of a matrix product."""


@triton.jit  # type: ignore[untyped-decorator] # untyped library
def _scores(  # type: ignore[no-untyped-def] # types are the compiler's
    query, keys, first_key, end, channels, stride, scale,
    D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Scaled products [rows, T] with the keys from `first_key` on, and which of them there are before `end`."""
    key_T = (first_key + tl.arange(0, T)).to(tl.int64)
    channel_D = tl.arange(0, D)
    inside = (key_T < end)[None, :] & (channel_D < channels)[:, None]
    keys_DT = tl.load(keys + key_T[None, :] * stride + channel_D[:, None], mask=inside, other=0.0)
    return tl.dot(query, keys_DT, input_precision="ieee") * scale, key_T < end


@triton.jit(do_not_specialize=["layers", "batch", "groups", "window"])  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def] # types are the compiler's
    query, keys, positions, out,
    layers, batch, groups, channels,
    q_layer, q_batch, q_head,
    k_layer, k_batch, k_key, k_group,
    scale, window,
    R: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One program: the R query heads that share a key head, of one layer and sequence."""
    program = tl.program_id(0).to(tl.int64)
    group, sequence, layer = program % groups, (program // groups) % batch, program // (groups * batch)
    row, channel = tl.arange(0, ROWS), tl.arange(0, D)
    here = query + layer * q_layer + sequence * q_batch + (group * R + row)[:, None] * q_head + channel[None, :]
    query_RD = tl.load(here, mask=(row < R)[:, None] & (channel < channels)[None, :], other=0.0)
    keys_TD = keys + layer * k_layer + sequence * k_batch + group * k_group
    position = tl.load(positions + sequence)
    first = tl.maximum(position - window, 0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    """Sum of exp(x - most) * (x - most)."""
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(first, position + 1, T):
        scores, seen = _scores(query_RD, keys_TD, start, position + 1, channels, k_key, scale, D, T)
        largest = tl.maximum(most, tl.max(tl.where(seen[None, :], scores, float("-inf")), 1))
        below = tl.where(seen[None, :], scores - largest[:, None], 0.0)
        chances = tl.where(seen[None, :], tl.exp(below), 0.0)
        moved = tl.where(total > 0, most - largest, 0.0)
        shrink = tl.exp(moved)
        weighted = (weighted + moved * total) * shrink + tl.sum(chances * below, 1)
        total = total * shrink + tl.sum(chances, 1)
        most = largest
        is_sink = (start + tl.arange(0, T)) == 0
        sink = tl.where(start == 0, tl.sum(tl.where(is_sink[None, :], scores, 0.0), 1), sink)
    count = (position + 1 - first).to(tl.float32)
    entropy = tl.maximum(tl.log(total) - weighted / total, 0.0) / tl.maximum(tl.log(count), 1e-9)
    entropy = tl.where(count > 1, entropy, 0.0)  # rounding of one key is no uncertainty
    heads = groups * R
    place = out + (sequence * layers + layer) * heads + group * R + row
    plane = batch * layers * heads
    tl.store(place, entropy, mask=row < R)
    tl.store(place + plane, 1.0 / total, mask=row < R)
    tl.store(place + 2 * plane, tl.exp(sink - most) / total, mask=row < R)


@triton.jit(do_not_specialize=["batch", "count", "attended", "window"])  # type: ignore[untyped-decorator]
def _row(  # type: ignore[no-untyped-def] # types are the compiler's
    query, keys, positions, pins, out,
    batch, count, attended, channels,
    q_layer, q_batch, q_head,
    k_layer, k_batch, k_key, k_group,
    scale, window,
    ROWS: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One program: the probabilities of one pinned head of one sequence, as codes of their roots."""
    program = tl.program_id(0).to(tl.int64)
    pin, sequence = program // batch, program % batch
    layer, head, group = tl.load(pins + pin), tl.load(pins + count + pin), tl.load(pins + 2 * count + pin)
    row, channel = tl.arange(0, ROWS), tl.arange(0, D)
    here = query + layer * q_layer + sequence * q_batch + head * q_head + row[:, None] * 0 + channel[None, :]
    query_RD = tl.load(here, mask=(row < 1)[:, None] & (channel < channels)[None, :], other=0.0)
    keys_TD = keys + layer * k_layer + sequence * k_batch + group * k_group
    position = tl.load(positions + sequence)
    first = tl.maximum(position - window, 0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(first, position + 1, T):
        scores, seen = _scores(query_RD, keys_TD, start, position + 1, channels, k_key, scale, D, T)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, 1))
        total = total * tl.exp(most - largest) + tl.sum(tl.exp(scores - largest[:, None]), 1)
        most = largest
    for start in range(0, attended, T):
        scores, seen = _scores(query_RD, keys_TD, start, position + 1, channels, k_key, scale, D, T)
        key_T = start + tl.arange(0, T)
        chances = tl.exp(scores - most[:, None]) / total[:, None]
        codes = tl.floor(tl.sqrt(chances) * 255.0 + 0.5)
        codes = tl.where((seen & (key_T >= first))[None, :], codes, 0.0)
        mine = tl.sum(tl.where((row == 0)[:, None], codes, 0.0), 0)
        tl.store(out + program * attended + key_T, mine.to(tl.uint8), mask=key_T < attended)


def head_measures(
    query_LBHD: torch.Tensor, keys_LBTGD: torch.Tensor, positions_B: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """fp32 [3, B, L, H] of each sequence's query at its position, keys before and at it: entropy over the logarithm of
    keys seen, largest probability, that of key 0."""
    (layers, batch, heads, channels), groups = query_LBHD.shape, keys_LBTGD.size(3)
    out = torch.empty((3, batch, layers, heads), device=query_LBHD.device)
    _measure[(layers * batch * groups,)](
        query_LBHD, keys_LBTGD, positions_B, out,
        layers, batch, groups, channels, *query_LBHD.stride()[:3], *keys_LBTGD.stride()[:4],
        rule.scale, _seen_before(rule, keys_LBTGD),
        R=heads // groups, ROWS=_rows(heads // groups), D=_rows(channels), T=_BLOCK,
    )  # fmt: skip
    return out


def pinned_codes(
    query_LBHD: torch.Tensor,
    keys_LBTGD: torch.Tensor,
    positions_B: torch.Tensor,
    pins_3P: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    """Codes u8s [P, B, T] of the rows of these heads: int64 layer, query head and key head of each, of this rank."""
    _, batch, attended, _, _ = keys_LBTGD.shape
    count = pins_3P.size(1)
    out = torch.empty((count, batch, attended), dtype=torch.uint8, device=query_LBHD.device)
    _row[(count * batch,)](
        query_LBHD, keys_LBTGD, positions_B, pins_3P, out,
        batch, count, attended, query_LBHD.size(3), *query_LBHD.stride()[:3], *keys_LBTGD.stride()[:4],
        rule.scale, _seen_before(rule, keys_LBTGD),
        ROWS=_LEAST_ROWS, D=_rows(query_LBHD.size(3)), T=_BLOCK,
    )  # fmt: skip
    return out


def _seen_before(rule: AttentionRule, keys_LBTGD: torch.Tensor) -> int:
    """Keys before its own that a query sees."""
    return keys_LBTGD.size(2) if rule.window is None else rule.window


def _rows(count: int) -> int:
    return max(_LEAST_ROWS, 1 << (count - 1).bit_length())
