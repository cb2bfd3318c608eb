"""Philox4x32-10, the counter-based generator of Salmon et al. (Parallel random numbers: as easy as 1, 2, 3; SC 2011).

The integers are equal on every device. Uniform numbers are exact functions of them. Normal numbers are those
of the Box-Muller transform in float64, rounded to float32: devices differ where their logarithm and cosine do, by a
unit in the last place of float32 at most.
"""

import math
from typing import NamedTuple

import torch

Key = tuple[int, int]
"""Two integers of 32 bits."""
Uint32 = torch.Tensor | int
"""An unsigned integer of 32 bits, or a tensor of such integers as int64."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_UNIT = 2.0**-32


class Counter(NamedTuple):
    """Number of a block: four integers, which broadcast against each other."""

    first: Uint32
    second: Uint32 = 0
    third: Uint32 = 0
    fourth: Uint32 = 0


class RandomBlock(NamedTuple):
    """Block of four random integers, each an int64 tensor of values below 2^32."""

    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor
    fourth: torch.Tensor


def philox(counter: Counter, key: Key, device: torch.device) -> RandomBlock:
    """Return the block of each counter, in the shape to which the counters broadcast."""
    state = [_tensor(number, device) for number in counter]
    first_key, second_key = key
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product(number, multiplier) for number, multiplier in zip(state[::2], _MULTIPLIERS, strict=True)
        )
        state = [high_1 ^ state[1] ^ first_key, low_1, high_0 ^ state[3] ^ second_key, low_0]
        first_key, second_key = (first_key + _WEYL[0]) & _MASK, (second_key + _WEYL[1]) & _MASK
    shape = torch.broadcast_shapes(*(number.shape for number in state))  # type: ignore[no-untyped-call] # torch's gap
    return RandomBlock(*(number.expand(shape) for number in state))


def _tensor(number: Uint32, device: torch.device) -> torch.Tensor:
    """Return a tensor. A Python number is filled in on the device: a CUDA graph cannot copy it from the host."""
    if isinstance(number, torch.Tensor):
        return number
    return torch.full((), number, dtype=torch.int64, device=device)


def _product(number: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower half of a product. The signed product wraps around, so all of its bits are right."""
    product = number * multiplier
    return (product >> 32) & _MASK, product & _MASK


def uniform(integers: torch.Tensor) -> torch.Tensor:
    """Return numbers in (0, 1) as float64: (integer + 1/2) / 2^32."""
    return (integers.double() + 0.5) * _UNIT


def normal(block: RandomBlock) -> torch.Tensor:
    """Return one number of N(0, 1) of each block, float32 (Box and Muller 1958)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(block.first)))
    return (radius * torch.cos((2.0 * math.pi) * uniform(block.second))).float()
