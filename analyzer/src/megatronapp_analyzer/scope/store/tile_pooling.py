"""Tiles whose rows are more than the hub keeps: rows come in pieces, and are pooled as they come. Pure.

A tile of a coarse level needs the rows of many queries, each as long as its position: of a text of 11 000 tokens the
widest one needs 60 MB, for 64 KiB that are shown. What a tile has taken of them stays, however often it is asked for;
one that would take too many pieces, for each of which the model reads the text once more, is refused with what fits.
While a text grows, a tile that it makes longer is finished as it was asked for first, and grows once it was shown: who
asks again and again gets it, however fast tokens come.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget, RetentionClass
from megatronapp_analyzer.scope.views.tiles import TILE, TileRef
from megatronapp_analyzer.web.problems import ApiError

HeadKey = tuple[int, int, int]
"""Sample, layer and head."""
TileKey = tuple[int, int, int]
"""Level, query and key of a tile."""
LARGE_SHARE = 32
"""Rows of a tile that take more than one in so many bytes of the ring are not kept, but pooled."""
PIECE_SHARE = 16
"""A piece has at most one in so many bytes of the ring."""
MAX_CHUNKS = 32
"""Of one tile."""
PATIENCE = 64
"""By so many tokens a text may have grown since somebody who waits asked last."""


def rows_bytes(queries: range) -> int:
    """Of the rows of these queries: each has a code for every key up to its own position."""
    return (queries.start + 1 + queries.stop) * len(queries) // 2


@dataclasses.dataclass(slots=True)
class PooledTile:
    """A tile as far as its rows have come; `next` is the first query that is still to come."""

    place: TileRef
    """As it is made: of a text as long as it was when the tile was asked for first, or first after it was shown."""
    next: int
    newest: TileRef
    """As it was asked for last."""
    since: int
    """How long the text was when somebody began to wait for it."""
    shown: int | None = None
    """How long the text was when it was shown last; None before."""
    ticket: int = 0
    codes: NDArray[np.uint8] = dataclasses.field(default_factory=lambda: np.zeros((TILE, TILE), np.uint8))

    def request(self, place: TileRef, *, grows: bool, others_wait: bool) -> None:
        """It is asked for, of a text that still `grows` or not. `others_wait`: for tiles that were asked for before."""
        if place.length > self.newest.length:
            self.newest = place
        is_seen = self.shown is not None and place.length > self.shown
        if (self.whole and is_seen and not others_wait) or self.newest.full or not grows:
            self.place = self.newest
        if self.whole:
            self.shown = place.length
        elif self.shown is not None:
            self.since, self.shown = place.length, None

    def waits(self, length: int) -> bool:
        """Whether somebody has waited for it since the text was shorter, and has not given up."""
        return not self.whole and self.since < length <= self.newest.length + PATIENCE

    def add(self, rows: Mapping[int, NDArray[Any]]) -> None:
        """Pool rows, as far as they follow those that are here."""
        level = self.place.level
        span = TILE << level
        while self.next < self.newest.needed.stop and self.next in rows:
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
        """As `tiles.tile` makes it, of all rows that have come; smaller at the ends of the map."""
        side = 1 << self.place.level
        place = dataclasses.replace(self.place, length=max(self.place.length, self.next))
        return self.codes[: -(-len(place.queries) // side), : -(-len(place.keys) // side)].copy()


class TilePool:
    """Tiles of one run that are made of pieces, as long as the ring has room for them.

    `grows`: whether more tokens may come of a sample, or (None) of any.
    """

    def __init__(self, ring: MemoryBudget, *, grows: Callable[[int | None], bool] = lambda _: False) -> None:
        self._ring = ring
        self._grows = grows
        self._makings: dict[HeadKey, dict[TileKey, PooledTile]] = {}

    def fit(self, place: TileRef) -> bool:
        """Whether the rows of a tile fit beside others, and will be no more; then they are kept as they are."""
        is_small = rows_bytes(place.needed) * LARGE_SHARE <= self._ring.limit_bytes
        return is_small and (place.full or not self._grows(None))

    def check(self, place: TileRef) -> None:
        """Raises ApiError 413 for a tile that would take too many pieces, with what fits."""
        most = MAX_CHUNKS * (self._ring.limit_bytes // PIECE_SHARE)
        needed = rows_bytes(place.needed)
        if needed > most:
            text = f"this tile shows {len(place.needed)} queries, whose rows have {needed >> 10} KiB; "
            raise ApiError(413, "too-large", f"{text}{most >> 10} KiB can be read for one", _what_fits(place, most))

    def making(self, head: HeadKey, place: TileRef) -> PooledTile:
        """A tile as it is so far; it is the newest in the ring then."""
        key = place.level, place.q, place.k
        tiles = self._makings.setdefault(head, {})
        made = tiles.setdefault(key, PooledTile(place, place.needed.start, place, place.length))
        others_wait = any(one.waits(place.length) for one in tiles.values() if one is not made)
        made.request(place, grows=self._grows(head[0]), others_wait=others_wait)
        self._ring.release(made.ticket)
        made.ticket = self._ring.hold(RetentionClass.ROWS, made.codes.nbytes, lambda: self._forget(head, key, made))
        return made

    def _forget(self, head: HeadKey, key: TileKey, made: PooledTile) -> None:
        if self._makings.get(head, {}).get(key) is made:
            del self._makings[head][key]

    def add(self, head: HeadKey, rows: Iterable[tuple[int, NDArray[Any]]]) -> None:
        """Rows of a head by their positions, for all its tiles that wait for them."""
        known = dict(rows)
        for made in self._makings.get(head, {}).values():
            made.add(known)

    def next_queries(self, made: PooledTile) -> range:
        """Queries to ask for next: the same for tiles of the same queries at a level that were asked for together."""
        queries = made.place.queries
        room = max(1, self._ring.limit_bytes // PIECE_SHARE // queries.stop)
        size = 1 << (room.bit_length() - 1)
        return range(made.next, min(made.next // size * size + size, queries.stop))

    def close(self) -> None:
        """Give the room back."""
        for tiles in self._makings.values():
            for made in tiles.values():
                self._ring.release(made.ticket)
        self._makings.clear()


def _what_fits(place: TileRef, most: int) -> str:
    """What to ask for instead of a tile that is too large: a finer level there, and how far this one reaches."""
    finer = next((level for level in range(place.level - 1, 0, -1) if _fits_at(place, level, most)), 0)
    span = TILE << place.level
    count = 0
    while rows_bytes(range(count * span, (count + 1) * span)) <= most:
        count += 1
    reach = f"; level {place.level} shows queries before {count * span}" if count else ""
    return f"Look closer: level {finer} fits here{reach}."


def _fits_at(place: TileRef, level: int, most: int) -> bool:
    """Whether the last tile of these queries fits at a finer level."""
    span = TILE << level
    first = (place.queries.stop - 1) // span * span
    return rows_bytes(range(first, min(first + span, place.queries.stop))) <= most
