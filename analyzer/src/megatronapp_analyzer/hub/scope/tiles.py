"""Pieces of an attention map: 256 x 256 codes, at level n the largest of 2^n x 2^n. Pure.

The code of a probability grows with it, so that the largest code is the code of the largest probability.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 256
MAX_LEVEL = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Which tile of a map of `length` queries and keys."""

    level: int
    q: int
    k: int
    length: int

    @property
    def queries(self) -> range:
        """Rows of the map that it shows."""
        return self._range(self.q)

    @property
    def keys(self) -> range:
        """Columns of the map that it shows."""
        return self._range(self.k)

    def _range(self, index: int) -> range:
        span = TILE << self.level
        return range(min(index * span, self.length), min((index + 1) * span, self.length))

    @property
    def inside(self) -> bool:
        """Whether the map has such a place."""
        return self.level <= MAX_LEVEL and len(self.queries) > 0 and len(self.keys) > 0

    @property
    def full(self) -> bool:
        """Whether a longer map would show the same."""
        return len(self.queries) == TILE << self.level

    @property
    def needed(self) -> range:
        """Queries that see any of the keys; the others are above the diagonal."""
        return range(max(self.queries.start, self.keys.start), self.queries.stop)


def missing(place: Place, rows: Mapping[int, NDArray[Any]]) -> range | None:
    """The smallest range of queries with all that are not there; None if all are."""
    absent = [query for query in place.needed if query not in rows]
    return range(absent[0], absent[-1] + 1) if absent else None


def tile(place: Place, rows: Mapping[int, NDArray[Any]]) -> NDArray[np.uint8]:
    """The tile; smaller at the ends of the map."""
    side, first = 1 << place.level, place.keys.start
    columns = -(-len(place.keys) // side)
    out = np.zeros((-(-len(place.queries) // side), columns), np.uint8)
    padded = np.zeros(columns * side, np.uint8)
    for query in place.needed:
        end = min(place.keys.stop, query + 1)
        seen = rows[query][first:end]
        padded[: seen.size] = seen
        padded[seen.size :] = 0
        line = out[(query - place.queries.start) // side]
        np.maximum(line, padded.reshape(columns, side).max(axis=1), out=line)
    return out


def etag(data: bytes) -> str:
    """The same for the same bytes."""
    return f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
