"""Check that data-parallel replicas have the same weights, by digests that are computed on the device."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_trainer.errors import TrainerError
from megatronapp_trainer.parallel.agreement import Agreement

_PART = 1 << 22
"""Elements that are converted at a time: a digest takes little memory."""
_FACTOR = 6364136223846793005
"""Odd multiplier of a linear congruential generator (Knuth, MMIX)."""
_SHOWN = 4


def check_equal_weights(chunks: list[Any], *, step: int) -> None:
    """Compare the weights of all replicas bit by bit; collective over all ranks.

    Raises:
        TrainerError: weights differ, or those of another rank do; it names the first of them.
    """
    agreement = Agreement()
    different = differing_weights(chunks)
    with agreement.attempt():
        if different:
            more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise TrainerError(
                f"after step {step} replicas have different weights: {', '.join(different[:_SHOWN])}{more}. A device, "
                "its memory or a link has computed or carried a wrong value; resume from a checkpoint before it, "
                "on other nodes"
            )
    agreement.settle()


def differing_weights(chunks: list[Any]) -> list[str]:
    """Return the names of the parameters that differ between replicas; collective over the data-parallel groups."""
    from megatron.core import parallel_state

    groups = {
        True: parallel_state.get_data_parallel_group(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    found: list[str] = []
    for shared, group in groups.items():
        named = [entry for entry in _named_parameters(chunks) if getattr(entry[1], "allreduce", True) is shared]
        if not named or dist.get_world_size(group) == 1:
            continue
        digests = torch.stack([digest(parameter) for _, parameter in named])
        least, most = digests.clone(), digests.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        found += [named[place][0] for place in (least != most).nonzero().flatten().tolist()]
    return found


def _named_parameters(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, chunk in enumerate(chunks):
        prefix = f"chunk {number} " if len(chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            yield prefix + name.replace("module.", ""), parameter


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number of the bits of a tensor and their places, int64 [].

    It is a sum modulo 2^64 of each element's bits times an odd number for its place, so that any single element that
    differs changes it.
    """
    bits = tensor.detach().contiguous().view(-1)
    bits = bits.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    total = torch.zeros([], dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), _PART):
        part = bits[first : first + _PART].long()
        places = torch.arange(first, first + part.numel(), device=bits.device)
        total += (part * ((2 * places + 1) * _FACTOR)).sum()
    return total
