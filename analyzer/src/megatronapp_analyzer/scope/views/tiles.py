"""Pieces of an attention map: 256 x 256 codes, at level n the largest of 2^n x 2^n. Pure.

The code of a probability grows with it, so that the largest code is the code of the largest probability.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_common import frames
from megatronapp_common.frames import FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame

TILE = 256
MAX_LEVEL = 12
MAX_TILES = 16
"""Tiles of one answer: 1 MiB, and more than a page shows of a map at a time."""
ROWS_AT_ONCE = 64
"""Rows of a map that are reduced at a time; a power of 2."""


@dataclasses.dataclass(frozen=True, slots=True)
class TileRef:
    """Which tile of a map of `length` queries and keys."""

    level: int
    q: int
    k: int
    length: int

    @property
    def queries(self) -> range:
        """Return the rows of the map that it shows."""
        return self._range(self.q)

    @property
    def keys(self) -> range:
        """Return the columns of the map that it shows."""
        return self._range(self.k)

    def _range(self, index: int) -> range:
        span = TILE << self.level
        return range(min(index * span, self.length), min((index + 1) * span, self.length))

    @property
    def inside(self) -> bool:
        """Return whether the tile is within the map."""
        return self.level <= MAX_LEVEL and len(self.queries) > 0 and len(self.keys) > 0

    @property
    def full(self) -> bool:
        """Return whether a longer map would show the same."""
        return len(self.queries) == TILE << self.level

    @property
    def needed(self) -> range:
        """Return queries that see any of the keys; the others are above the diagonal."""
        return range(max(self.queries.start, self.keys.start), self.queries.stop)


def missing(place: TileRef, rows: Mapping[int, NDArray[Any]]) -> range | None:
    """Return the smallest range with all missing queries; None if all are known."""
    absent = [query for query in place.needed if query not in rows]
    return range(absent[0], absent[-1] + 1) if absent else None


def tile(place: TileRef, rows: Mapping[int, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return the tile; smaller at the edges of the map."""
    side, start = 1 << place.level, place.queries.start
    columns = -(-len(place.keys) // side)
    out = np.zeros((-(-len(place.queries) // side), columns), np.uint8)
    depth = min(side, ROWS_AT_ONCE)
    for begin in range(start, place.queries.stop, ROWS_AT_ONCE):
        strip = range(begin, min(begin + ROWS_AT_ONCE, place.queries.stop))
        lines = -(-len(strip) // depth)
        largest = _laid(place, strip, rows, (lines * depth, columns * side)).reshape(lines, depth, -1).max(axis=1)
        for _ in range(place.level):
            largest = np.maximum(largest[:, ::2], largest[:, 1::2])
        line = (begin - start) // side
        np.maximum(out[line : line + lines], largest, out=out[line : line + lines])
    return out


def _laid(place: TileRef, strip: range, rows: Mapping[int, NDArray[Any]], shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Copy rows of the map, as far as the tile shows them, into one array; 0 elsewhere."""
    first, end, needed = place.keys.start, place.keys.stop, max(strip.start, place.needed.start)
    seen = [rows[query][first : query + 1 if query < end else end] for query in range(needed, strip.stop)]
    if len(seen) == shape[0] and seen[0].size == shape[1]:
        return np.concatenate(seen).reshape(shape)
    out = np.zeros(shape, np.uint8)
    for line, row in enumerate(seen, needed - strip.start):
        out[line, : row.size] = row
    return out


def body(header: Mapping[str, Any], found: Iterable[tuple[str, NDArray[np.uint8]]]) -> bytes:
    """Encode a frame SCOPE_TILES with these tiles under their names."""
    return frames.encode(
        build_frame(FrameType.SCOPE_TILES, header, (Tensor(name, "u8s", levels) for name, levels in found))
    )


def etag(data: bytes) -> str:
    """Return an entity tag that is the same for the same bytes."""
    return f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
