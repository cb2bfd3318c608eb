"""Random generators that depend on a key alone."""

import hashlib

import torch


def generator_of(key: str) -> torch.Generator:
    """A CPU generator that depends on the key alone. Its Mersenne Twister takes 32 bits of seed, so 4 bytes of hash."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
