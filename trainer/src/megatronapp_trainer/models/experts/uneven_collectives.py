"""Collectives over parts of different lengths, where gloo has none: experts get unequal numbers of tokens."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_MAPPINGS = "megatron.core.tensor_parallel.mappings"


def install() -> None:
    """Let megatron-core gather and scatter uneven parts by our functions in groups of gloo. Safe to call again."""
    mappings: Any = importlib.import_module(_MAPPINGS)
    if hasattr(mappings._gather_along_first_dim, "__wrapped__"):
        return
    mappings._gather_along_first_dim = _instead(mappings._gather_along_first_dim, gather_uneven)
    mappings._reduce_scatter_along_first_dim = _instead(mappings._reduce_scatter_along_first_dim, reduce_scatter_uneven)


def gather_uneven(part: torch.Tensor, sizes: Sequence[int], group: Any) -> torch.Tensor:  # noqa: ANN401 - ProcessGroup
    """Concatenate the parts of all ranks of a group along the first axis; `sizes`: rows of each rank's part."""
    longest = max(sizes)
    padded = part.new_zeros(longest, *part.shape[1:])
    padded[: part.size(0)] = part
    gathered = part.new_empty(len(sizes) * longest, *part.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(torch.split(gathered, longest), sizes, strict=True)])


def reduce_scatter_uneven(whole: torch.Tensor, sizes: Sequence[int], group: Any) -> torch.Tensor:  # noqa: ANN401
    """Return this rank's part, along the first axis, of the sum over a group; `sizes`: rows of each rank's part."""
    total = whole.clone()
    dist.all_reduce(total, group=group)
    part: torch.Tensor = torch.split(total, list(sizes))[group.rank()]
    return part.contiguous()


def _instead(
    even: Callable[..., torch.Tensor], uneven: Callable[[torch.Tensor, Sequence[int], Any], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return megatron-core's function, replaced by ours for given sizes in groups without NCCL."""

    @functools.wraps(even)
    def function(
        tensor: torch.Tensor,
        group: Any,  # noqa: ANN401 - ProcessGroup
        sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1 or dist.get_backend(group) == "nccl":
            return even(tensor, group, sizes, use_global_buffer)
        if max(sizes) == 0:
            return tensor.new_empty(0, *tensor.shape[1:])
        return uneven(tensor, sizes, group)

    return function
