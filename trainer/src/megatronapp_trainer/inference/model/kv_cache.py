"""Cache of keys and values: its size, the check before it is allocated, and the tensors.

Shapes: L layers of this rank, Z slots, T tokens of a slot and one more, G key heads of this rank, D channels of a head.
"""

import dataclasses
import math

import torch

from megatronapp_trainer.inference.errors import CacheTooLargeError

_MEMORY_FRACTION = 0.9
"""Fraction of the free memory for the cache; the rest is for activations."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheShape:
    """Sizes of the cache of one rank."""

    layers: int
    slots: int
    """Number of sequences at a time."""
    capacity: int
    """Number of tokens of a sequence, prompt and generated ones together."""
    key_heads: int
    channels: int
    dtype: torch.dtype

    @property
    def rows_per_slot(self) -> int:
        """Return one more than the tokens: the last row takes what padding writes, and is never read."""
        return self.capacity + 1

    @property
    def num_bytes(self) -> int:
        """Return the bytes of keys and values of all layers."""
        return self.slots * self.bytes_per_slot

    @property
    def bytes_per_slot(self) -> int:
        """Return the bytes of keys and values of one slot in all layers."""
        return self.rows_per_slot * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of key and value of one token in all layers."""
        return 2 * self.layers * self.key_heads * self.channels * self.dtype.itemsize


def check_memory(shape: KvCacheShape, *, free_bytes: int, place: str) -> None:
    """Raise CacheTooLargeError, with what does fit, where the cache needs over 90 % of the free memory."""
    available_bytes = int(free_bytes * _MEMORY_FRACTION)
    if shape.num_bytes <= available_bytes:
        return
    slots = available_bytes // shape.bytes_per_slot
    capacity = available_bytes // (shape.slots * shape.bytes_per_token) - 1
    fits = []
    if slots > 0:
        fits.append(f"{slots} slots of {shape.capacity} tokens")
    if capacity > 0:
        fits.append(f"{shape.slots} slots of {capacity} tokens")
    raise CacheTooLargeError(
        f"the cache of keys and values for {shape.slots} slots of {shape.capacity} tokens needs "
        f"{_gib(shape.num_bytes)}, and {_gib(available_bytes)} of {place} may be used for it (90 % of what is free); "
        + (f"what fits: {', or '.join(fits)}" if fits else "no slot fits; use more ranks or a larger device")
    )


def _gib(count: int) -> str:
    digits = max(0, 2 - int(math.log10(max(count / 2**30, 1))))
    return f"{count / 2**30:.{digits}f} GiB"


class KvCache:
    """Keys and values of all layers of this rank, one tensor each, so that a reader of all layers needs only one."""

    def __init__(self, shape: KvCacheShape, device: torch.device) -> None:
        size = (shape.layers, shape.slots, shape.rows_per_slot, shape.key_heads, shape.channels)
        self.keys_LZTGD = torch.zeros(size, dtype=shape.dtype, device=device)
        self._values_LZTGD = torch.zeros_like(self.keys_LZTGD)

    def layers(self) -> "list[LayerKvCache]":
        """Return the cache of each layer."""
        return [LayerKvCache(*pair) for pair in zip(self.keys_LZTGD, self._values_LZTGD, strict=True)]

    def clear_slot(self, slot: int) -> None:
        """Zero the keys and values of a slot."""
        self.keys_LZTGD[:, slot].zero_()
        self._values_LZTGD[:, slot].zero_()


class LayerKvCache:
    """Keys and values of one layer, each [Z, T, G, D], written after rotation."""

    def __init__(self, keys_ZTGD: torch.Tensor, values_ZTGD: torch.Tensor) -> None:
        self.keys_ZTGD = keys_ZTGD
        self.values_ZTGD = values_ZTGD
        self._flat_keys = self.keys_ZTGD.flatten(0, 1)
        self._flat_values = self.values_ZTGD.flatten(0, 1)

    def write(self, rows_N: torch.Tensor, keys_NGD: torch.Tensor, values_NGD: torch.Tensor) -> None:
        """Store tokens; a row is the slot times `rows_per_slot` plus the token's position."""
        self._flat_keys.index_copy_(0, rows_N, keys_NGD)
        self._flat_values.index_copy_(0, rows_N, values_NGD)
