"""Division of a sequence over the ranks of a context group, balanced for causal attention.

A sequence is cut into 2 x N chunks for N ranks, of which rank r holds the chunks r and 2N - 1 - r: an early one, whose
tokens see few others, and a late one, whose tokens see many. megatron-core's `get_batch_on_this_cp_rank` divides alike.
"""

import torch


def chunks_of_rank(rank: int, size: int) -> tuple[int, int]:
    """Return the early and the late chunk of a rank, of the 2 x `size` chunks of a sequence."""
    return rank, 2 * size - 1 - rank


def part_of_rank(tensor: torch.Tensor, dim: int, *, rank: int, size: int) -> torch.Tensor:
    """Return the tokens of a rank along `dim`, whose length is a multiple of 2 x `size`; the tensor itself of one."""
    if size == 1:
        return tensor
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat([chunks[chunk] for chunk in chunks_of_rank(rank, size)], dim)


def whole_sequence(parts: torch.Tensor) -> torch.Tensor:
    """Return the sequence [S, ...] of which `parts` [N, S / N, ...] are those of all ranks, in order."""
    early, late = parts.chunk(2, 1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def parts_of_ranks(sequence: torch.Tensor, size: int) -> torch.Tensor:
    """Return the parts [N, S / N, ...] of all ranks of a sequence [S, ...]; the reverse of `whole_sequence`."""
    early, late = sequence.view(2, size, -1, *sequence.shape[1:]).unbind()
    return torch.stack((early, late.flip(0)), 1).flatten(1, 2)
