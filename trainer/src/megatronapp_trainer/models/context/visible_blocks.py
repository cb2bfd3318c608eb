"""Blocks of pairs of tokens that see each other, of the queries of a rank and the keys of another.

Shapes: B samples, L tokens of a rank: its early chunk and its late one.
"""

from typing import NamedTuple

import torch


class Block(NamedTuple):
    """Some queries, and keys that each of them sees; in a causal block only those up to itself."""

    samples: slice
    queries: slice
    keys: slice
    is_causal: bool = False

    def of_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's part of [B, L, ...]."""
        return tensor[self.samples, self.queries]

    def of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's part of [B, L, ...]."""
        return tensor[self.samples, self.keys]


_ALL = slice(None)


def visible_blocks(rank: int, source: int, size: int, length: int) -> list[Block]:
    """Return the blocks of the queries of `rank` and the keys of `source`, ranks that have `length` tokens each."""
    early, late = slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return [Block(_ALL, _ALL, _ALL, is_causal=True)]
    return [Block(_ALL, _ALL, early)] if source < rank else [Block(_ALL, late, _ALL)]
