"""Noise of a recipe as a pure function of global coordinates, so that it is equal on every layout and in any batch.

The key is derived from the seed, the index of the perturbation in the recipe, and the site and layer, or the name of
the parameter. The counter holds (feature, position, sample, head) of an activation, or the index of an element in the
unsharded, unpadded parameter.
"""

import hashlib

import torch

from megatronapp_trainer.hooks.perturbation.philox import Counter, Key, RandomBlock, Uint32, normal, philox, uniform

BLOCK_ELEMENTS = 1 << 20
"""Number of elements for which noise is drawn at a time."""
DRAWING_BYTES = 128 * BLOCK_ELEMENTS
"""Memory that drawing takes at most: about 100 bytes for each element of a block, and the block itself."""


def noise_key(*identity: str | int) -> Key:
    """Return the key of an identity: the first 8 bytes of the BLAKE2b digest of its parts."""
    text = "\0".join(map(str, identity))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return number & 0xFFFFFFFF, number >> 32


def activation_block(
    key: Key, *, features: Uint32, positions: Uint32, samples: Uint32, heads: Uint32, device: torch.device
) -> RandomBlock:
    """Return the random blocks of activations; the coordinates broadcast against each other."""
    return philox(Counter(features, positions, samples, heads), key, device)


def element_block(key: Key, indices: torch.Tensor) -> RandomBlock:
    """Return the random blocks of elements of a parameter by their global indices (int64, below 2^63)."""
    return philox(Counter(indices & 0xFFFFFFFF, indices >> 32), key, indices.device)


def blocks_of_rows(rows: int, columns: int) -> list[slice]:
    """Return slices of the rows of a matrix, each with about as many elements as noise is drawn for at a time."""
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def gaussian(value: torch.Tensor, coefficient: float, block: RandomBlock) -> torch.Tensor:
    """Return value + N(0, coefficient^2), computed in float32 and rounded to the type of the value."""
    return (value.float() + coefficient * normal(block)).to(value.dtype)


def scaled(value: torch.Tensor, coefficient: float, block: RandomBlock) -> torch.Tensor:
    """Return value * U(1 - coefficient, 1 + coefficient), computed in float32 and rounded to the type of the value."""
    factor = 1.0 + coefficient * (2.0 * uniform(block.first) - 1.0)
    return (value.float() * factor.float()).to(value.dtype)
