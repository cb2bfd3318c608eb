"""Blocks of pairs of tokens that see each other, of the queries of a rank and the keys of another.

Shapes: B samples, L tokens of a rank: its early chunk and its late one.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatronapp_trainer.parallel.sequence import chunks_of_rank


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


def blocks_of_documents(rank: int, source: int, size: int, length: int, bounds: Sequence[int]) -> list[Block]:
    """Return the same blocks of samples with several documents, whose tokens see those of their own document alone.

    `bounds` are those of `models.packed_documents`. Of two different chunks at most one document has tokens in both:
    the end of the earlier chunk, and the beginning of the later one.
    """
    whole, chunk = length * size, length // 2
    blocks: list[Block] = []
    for sample in range(bounds[-1] // whole):
        documents = _of_sample(bounds, sample * whole, whole)
        for place, own in enumerate(chunks_of_rank(rank, size)):
            for other_place, other in enumerate(chunks_of_rank(source, size)):
                found = _in_chunk(documents, own * chunk, chunk) if own == other else ()
                if other < own:
                    found = _between(documents, own * chunk, other * chunk, chunk)
                blocks += [
                    Block(
                        slice(sample, sample + 1),
                        slice(queries.start + place * chunk, queries.stop + place * chunk),
                        slice(keys.start + other_place * chunk, keys.stop + other_place * chunk),
                        is_causal=own == other,
                    )
                    for queries, keys in found
                ]
    return blocks


def _of_sample(bounds: Sequence[int], first: int, length: int) -> list[tuple[int, int]]:
    """Return the documents of a sample by their first token and that after their last, counted within the sample."""
    return [
        (begin - first, end - first) for begin, end in itertools.pairwise(bounds) if first <= begin < first + length
    ]


def _in_chunk(documents: list[tuple[int, int]], first: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield the parts of documents in a chunk, as queries and as keys, counted within the chunk."""
    for begin, end in documents:
        part = slice(max(begin - first, 0), min(end - first, length))
        if part.start < part.stop:
            yield part, part


def _between(
    documents: list[tuple[int, int]], first: int, first_key: int, length: int
) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of a chunk and the keys of an earlier chunk that are of the same document, if there are any."""
    last_key = first_key + length
    for begin, end in documents:
        if begin < last_key and end > first:
            yield slice(0, min(end - first, length)), slice(max(begin - first_key, 0), length)
