"""Measures of a row of two branches, and the KL divergence from the parts of a vocabulary that tensor ranks hold.

With logits a and b of the two branches and Z the sums of their exponentials,

    KL(A || B) = sum_v p_a(v) (a_v - b_v) - log Z_a + log Z_b

Each rank sums over its own part of the vocabulary in float64; rank 0 merges the parts as in a sum of exponentials that
are scaled by their largest one. Equal logits give exactly 0, as both terms are then differences of equal numbers.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from megatronapp_trainer.device.compiling import can_compile

COLUMNS = ("peak_a", "sum_a", "weighted", "peak_b", "sum_b", "above", "token_a", "token_b")
"""Columns of a part: largest logit and sum of exponentials of A, sum of exp(a - peak) (a - b), those of B, number of
logits of B above that of the token, and the logits of the token in A and B, 0 on ranks that do not hold it."""


def divergence_parts(
    reference_V: torch.Tensor, logits: torch.Tensor, first: int, token_1: torch.Tensor
) -> torch.Tensor:
    """Return fp64 [P, 8], parts in the order of `COLUMNS`: one in torch, several from the kernel of a GPU.

    `reference_V`: logits of A in this rank's part of the vocabulary, which begins at `first`; `logits`: those of B in
    the whole vocabulary; `token_1`: the token, int64 [1].
    """
    count = reference_V.numel()
    if count and logits.is_cuda and can_compile():
        from megatronapp_trainer.scope.comparison import comparison_kernels

        return comparison_kernels.divergence(reference_V, logits, first, token_1, len(COLUMNS))
    part_V, token_b = logits[first : first + count], logits.index_select(0, token_1)
    return shard_part(reference_V, part_V, token_1 - first, token_b)[None]


def change_of(reference: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the norm of the difference over that of the reference, along the last axis, in fp32."""
    if values.is_cuda and can_compile():
        from megatronapp_trainer.scope.comparison import comparison_kernels

        return comparison_kernels.change(reference, values)
    reference, values = reference.float(), values.float()
    change: torch.Tensor = (values - reference).norm(dim=-1) / reference.norm(dim=-1)
    return change


def shard_part(a_V: torch.Tensor, b_V: torch.Tensor, token_1: torch.Tensor, token_b: torch.Tensor) -> torch.Tensor:
    """Return fp64 [8] in the order of `COLUMNS` from logits of this rank's part [V]; an empty part is allowed.

    `token_1`: place of the token in this part, int64 [1], outside of it where another rank holds it. `token_b`: its
    logit in B [1].
    """
    a_V, b_V, token_b = a_V.double(), b_V.double(), token_b.double()
    zero = a_V.new_zeros(1)
    if a_V.numel() == 0:
        least = a_V.new_full((1,), -torch.inf)
        return torch.cat([least, zero, zero, least, zero, zero, zero, zero])
    both_2V = torch.stack([a_V, b_V])
    peak_21 = both_2V.amax(1, keepdim=True)
    weight_2V = (both_2V - peak_21).exp()
    peak_a, peak_b = peak_21.unbind()
    sum_a, sum_b = weight_2V.sum(1, keepdim=True).unbind()
    weighted = torch.dot(weight_2V[0], a_V - b_V).reshape(1)
    above = (b_V > token_b).sum().reshape(1).double()
    is_here = (token_1 >= 0) & (token_1 < a_V.numel())
    token_a = a_V.index_select(0, token_1.clamp(0, a_V.numel() - 1))
    logits = torch.where(is_here, torch.stack([token_a, token_b]), zero)
    return torch.cat([peak_a, sum_a, weighted, peak_b, sum_b, above, logits.flatten()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """Difference of two distributions at one row."""

    kl: float
    rank: int
    """Number of tokens that are likelier in B than the token."""
    logprob_a: float
    """Log-probability of the token in A."""
    logprob_b: float


def merged(parts: NDArray[np.float64]) -> Divergence:
    """Merge parts of all shards, [shards, 8]."""
    peak_a, sum_a, weighted, peak_b, sum_b, above, token_a, token_b = parts.T
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        top_a, top_b = peak_a.max(), peak_b.max()
        scales = np.exp(peak_a - top_a)
        total_a = (scales * sum_a).sum()
        log_a = top_a + np.log(total_a)
        log_b = top_b + np.log((np.exp(peak_b - top_b) * sum_b).sum())
        kl = (scales * weighted).sum() / total_a - (log_a - log_b)
        return Divergence(
            kl=float(np.maximum(kl, 0.0)),  # NaN stays; rounding may give a negative number near 0
            rank=int(above.sum()),
            logprob_a=float(token_a.sum() - log_a),
            logprob_b=float(token_b.sum() - log_b),
        )
