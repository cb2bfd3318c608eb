"""Sums over whole distributions on a GPU in two passes over the logits; `token_statistics` has the rule in torch.

A program takes one row of logits. All sums are in fp32, of exponentials that are at most 1.
"""

import torch
import triton
import triton.language as tl

_SIZE = 1024


@triton.jit(do_not_specialize=["vocabulary"])  # type: ignore[untyped-decorator] # untyped library
def _sum(  # type: ignore[no-untyped-def] # types are the compiler's
    logits, inverse, out, vocabulary, stride,
    COUNT: tl.constexpr, TEMPERATURES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place_S, place_T = tl.arange(0, SIZE), tl.arange(0, TEMPERATURES)
    inverse_T = tl.load(inverse + place_T, mask=place_T < COUNT, other=1.0)
    largest_S = tl.full([SIZE], float("-inf"), tl.float32)
    for start in range(0, vocabulary, SIZE):
        inside = start + place_S < vocabulary
        value = tl.load(logits + row * stride + start + place_S, mask=inside, other=float("-inf"))
        largest_S = tl.maximum(largest_S, value)
    largest = tl.max(largest_S, 0)
    sums_T = tl.zeros([TEMPERATURES], tl.float32)
    whole_S = tl.zeros([SIZE], tl.float32)
    weighted_S = tl.zeros([SIZE], tl.float32)
    for start in range(0, vocabulary, SIZE):
        inside = start + place_S < vocabulary
        value = tl.load(logits + row * stride + start + place_S, mask=inside, other=float("-inf"))
        under = tl.where(inside, value - largest, 0.0)
        weight = tl.where(inside, tl.exp(under), 0.0)
        whole_S += weight
        weighted_S += weight * under
        scaled = tl.exp(under[None, :] * inverse_T[:, None])
        sums_T += tl.sum(tl.where(inside[None, :], scaled, 0.0), 1)
    whole = tl.sum(whole_S, 0)
    here = out + row * (COUNT + 2)
    tl.store(here, largest + tl.log(whole))
    tl.store(here + 1, tl.log(whole) - tl.sum(weighted_S, 0) / whole)
    tl.store(here + 2 + place_T, largest * inverse_T + tl.log(sums_T), mask=place_T < COUNT)


def sums(logits_RV: torch.Tensor, inverse_T: torch.Tensor) -> torch.Tensor:
    """Return fp32 [R, 2 + T] of fp32 logits: logsumexp, entropy in nats, logsumexp of logits x each of `inverse_T`."""
    rows, vocabulary = logits_RV.shape
    count = inverse_T.numel()
    out = torch.empty(rows, count + 2, device=logits_RV.device)
    _sum[(rows,)](
        logits_RV, inverse_T, out, vocabulary, logits_RV.stride(0),
        COUNT=count, TEMPERATURES=triton.next_power_of_2(count), SIZE=_SIZE, num_warps=8,
    )  # fmt: skip
    return out
