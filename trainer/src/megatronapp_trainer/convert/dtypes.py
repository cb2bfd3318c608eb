"""Types of numbers by the names of Megatron's flags."""

from collections.abc import Iterable

import torch

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The type of this name."""
    return _TYPES[name]


def name_of(dtypes: Iterable[torch.dtype]) -> str:
    """Names of the types, for people."""
    found = set(dtypes)
    return ", ".join(name for name, dtype in _TYPES.items() if dtype in found)
