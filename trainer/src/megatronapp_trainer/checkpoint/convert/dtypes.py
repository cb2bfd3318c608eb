"""Types of numbers by the names of Megatron's flags."""

from collections.abc import Iterable

import torch

from megatronapp_trainer.errors import CheckpointError

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """Return the type with this name."""
    return _TYPES[name]


def name_of(dtypes: Iterable[torch.dtype]) -> str:
    """Join the names of the types, for messages."""
    found = set(dtypes)
    return ", ".join(name for name, dtype in _TYPES.items() if dtype in found)


def precision_of(dtypes: Iterable[torch.dtype]) -> str:
    """Return the name of the only type of these, and fp32 for several, in which training or a server continues."""
    found = set(dtypes)
    return name_of(found) if len(found) == 1 else "fp32"


def converted(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Convert the tensor to another type.

    Raises CheckpointError if one of its numbers is beyond that type's largest.
    """
    made = tensor.to(dtype)
    if made.dtype == tensor.dtype or bool(made.isfinite().all()):
        return made
    largest = torch.finfo(dtype).max
    beyond = tensor.isfinite() & made.isinf()
    if not beyond.any():  # they were infinite before
        return made
    instead = "bf16 or fp32" if dtype is torch.float16 else "fp32"
    raise CheckpointError(
        f"{name} has {float(tensor[beyond].abs().max()):.4g}, and {name_of([dtype])} ends at {largest:.4g}: it would "
        f"become infinite; write --dtype {instead}, or omit --dtype to keep the numbers"
    )
