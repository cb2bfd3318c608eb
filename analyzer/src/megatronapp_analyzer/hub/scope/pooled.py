"""Tiles whose rows are more than the hub keeps: rows come in pieces, and are pooled as they come. Pure.

A tile of a coarse level needs the rows of many queries, each as long as its position: of a text of 11 000 tokens the
widest one needs 60 MB, for 64 KiB that are shown. What a tile has taken of them stays, however often it is asked for;
one that would take too many pieces, for each of which the model reads the text once more, is refused with what fits.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.problems import ApiError
from megatronapp_analyzer.hub.scope.ring import Held, Ring
from megatronapp_analyzer.hub.scope.tiles import TILE, Place

HeadKey = tuple[int, int, int]
"""Sample, layer and head."""
TileKey = tuple[int, int, int]
"""Level, query and key of a tile."""
LARGE_SHARE = 32
"""Rows of a tile that take more than one in so many bytes of the ring are not kept, but pooled."""
PIECE_SHARE = 16
"""A piece has at most one in so many bytes of the ring."""
MAX_PIECES = 32
"""Of one tile."""


def rows_bytes(queries: range) -> int:
    """Of the rows of these queries: each has a code for every key up to its own position."""
    return (queries.start + 1 + queries.stop) * len(queries) // 2


@dataclasses.dataclass(slots=True)
class Making:
    """A tile as far as its rows have come; `next` is the first query that is still to come."""

    place: Place
    next: int
    ticket: int = 0
    codes: NDArray[np.uint8] = dataclasses.field(default_factory=lambda: np.zeros((TILE, TILE), np.uint8))

    def add(self, rows: Mapping[int, NDArray[Any]]) -> None:
        """Pool rows, as far as they follow those that are here."""
        level = self.place.level
        span = TILE << level
        while self.next < self.place.needed.stop and self.next in rows:
            seen = rows[self.next][self.place.k * span : min((self.place.k + 1) * span, self.next + 1)]
            if seen.size:
                largest = np.maximum.reduceat(seen, np.arange(0, seen.size, 1 << level))
                line = self.codes[(self.next - self.place.queries.start) >> level]
                np.maximum(line[: largest.size], largest, out=line[: largest.size])
            self.next += 1

    @property
    def whole(self) -> bool:
        """Whether nothing is still to come."""
        return self.next >= self.place.needed.stop

    @property
    def tile(self) -> NDArray[np.uint8]:
        """As `tiles.tile` makes it; smaller at the ends of the map."""
        side = 1 << self.place.level
        return self.codes[: -(-len(self.place.queries) // side), : -(-len(self.place.keys) // side)].copy()


class PooledTiles:
    """Tiles of one run that are made of pieces, as long as the ring has room for them."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._makings: dict[HeadKey, dict[TileKey, Making]] = {}

    def fit(self, place: Place) -> bool:
        """Whether the rows of a tile fit beside others; then they are kept as they are."""
        return rows_bytes(place.needed) * LARGE_SHARE <= self._ring.limit_bytes

    def check(self, place: Place) -> None:
        """Raises ApiError 413 for a tile that would take too many pieces, with what fits."""
        most = MAX_PIECES * (self._ring.limit_bytes // PIECE_SHARE)
        needed = rows_bytes(place.needed)
        if needed > most:
            text = f"this tile shows {len(place.needed)} queries, whose rows have {needed >> 10} KiB; "
            raise ApiError(413, "too-large", f"{text}{most >> 10} KiB can be read for one", _what_fits(place, most))

    def making(self, head: HeadKey, place: Place) -> Making:
        """A tile as it is so far; it is the newest in the ring then."""
        key = place.level, place.q, place.k
        made = self._makings.setdefault(head, {}).setdefault(key, Making(place, place.needed.start))
        made.place = place
        self._ring.release(made.ticket)
        made.ticket = self._ring.hold(Held.ROWS, made.codes.nbytes, lambda: self._forget(head, key, made))
        return made

    def _forget(self, head: HeadKey, key: TileKey, made: Making) -> None:
        if self._makings.get(head, {}).get(key) is made:
            del self._makings[head][key]

    def add(self, head: HeadKey, rows: Iterable[tuple[int, NDArray[Any]]]) -> None:
        """Rows of a head by their positions, for all its tiles that wait for them."""
        known = dict(rows)
        for made in self._makings.get(head, {}).values():
            made.add(known)

    def piece(self, made: Making) -> range:
        """Queries to ask for next: the same for all tiles that show the same queries at a level."""
        queries = made.place.queries
        room = max(1, self._ring.limit_bytes // PIECE_SHARE // queries.stop)
        size = 1 << (room.bit_length() - 1)
        first = max(queries.start, made.next // size * size)
        return range(first, min(made.next // size * size + size, queries.stop))

    def close(self) -> None:
        """Give the room back."""
        for tiles in self._makings.values():
            for made in tiles.values():
                self._ring.release(made.ticket)
        self._makings.clear()


def _what_fits(place: Place, most: int) -> str:
    """What to ask for instead of a tile that is too large: a finer level there, and how far this one reaches."""
    finer = next((level for level in range(place.level - 1, 0, -1) if _fits_at(place, level, most)), 0)
    span = TILE << place.level
    count = 0
    while rows_bytes(range(count * span, (count + 1) * span)) <= most:
        count += 1
    reach = f"; level {place.level} shows queries before {count * span}" if count else ""
    return f"Look closer: level {finer} fits here{reach}."


def _fits_at(place: Place, level: int, most: int) -> bool:
    """Whether the last tile of these queries fits at a finer level."""
    span = TILE << level
    first = (place.queries.stop - 1) // span * span
    return rows_bytes(range(first, min(first + span, place.queries.stop))) <= most
