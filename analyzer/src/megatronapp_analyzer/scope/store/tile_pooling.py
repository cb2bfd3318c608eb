"""Tiles whose rows need more memory than the hub has: they arrive in chunks, and are pooled as they arrive. Pure.

A tile of a coarse level needs the rows of many queries, each as long as its position: of a text of 11 000 tokens the
widest one needs 60 MB, for 64 KiB that are shown. A tile keeps what it has pooled, however often it is requested. One
that would need too many chunks, for each of which the model reads the text once more, is refused with what fits. While
a text grows, a tile is finished at the length of its first request, and grows only once it was shown: a page that
repeats its request gets the tile, however fast tokens arrive.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget, RetentionClass
from megatronapp_analyzer.scope.views.tiles import TILE, TileRef
from megatronapp_common.web.problems import HttpError

HeadKey = tuple[int, int, int]
"""Sample, layer and head."""
TileKey = tuple[int, int, int]
"""Level, query and key of a tile."""
LARGE_SHARE = 32
"""Rows that take more than this fraction of the memory budget (1/32) are pooled, not stored."""
PIECE_SHARE = 16
"""Largest size of a chunk, as a fraction of the memory budget (1/16)."""
MAX_CHUNKS = 32
"""Chunks that one tile may need."""
PATIENCE = 64
"""Tokens by which a text may grow after the last request for a tile, until nothing waits for that tile any more."""


def rows_bytes(queries: range) -> int:
    """Return the size of the rows of these queries: each has a code for every key up to its own position."""
    return (queries.start + 1 + queries.stop) * len(queries) // 2


@dataclasses.dataclass(slots=True)
class PooledTile:
    """A tile with the rows that have arrived; `next` is the first query that is missing."""

    place: TileRef
    """The tile that is being made: its length is that of the text at the first request, or at the first after it was
    shown."""
    next: int
    newest: TileRef
    """The tile of the newest request."""
    since: int
    """Length of the text at the first request that is still waiting."""
    shown: int | None = None
    """Length of the text when the tile was shown last; None before."""
    ticket: int = 0
    codes: NDArray[np.uint8] = dataclasses.field(default_factory=lambda: np.zeros((TILE, TILE), np.uint8))

    def request(self, place: TileRef, *, grows: bool, others_wait: bool) -> None:
        """Note a request for a text that still `grows` or not. `others_wait`: for tiles that were requested before."""
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
        """Return whether an older request still waits for the tile, and has not been given up."""
        return not self.whole and self.since < length <= self.newest.length + PATIENCE

    def add(self, rows: Mapping[int, NDArray[Any]]) -> None:
        """Pool rows that follow those pooled so far."""
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
        """Return whether all rows have arrived."""
        return self.next >= self.place.needed.stop

    @property
    def tile(self) -> NDArray[np.uint8]:
        """Return what `tiles.tile` makes of the rows that have arrived; smaller at the edges of the map."""
        side = 1 << self.place.level
        place = dataclasses.replace(self.place, length=max(self.place.length, self.next))
        return self.codes[: -(-len(place.queries) // side), : -(-len(place.keys) // side)].copy()


class TilePool:
    """Tiles of one run that are made of chunks, as long as the memory budget has room for them.

    `grows`: returns whether a sample, or (None) any sample, may get more tokens.
    """

    def __init__(self, ring: MemoryBudget, *, grows: Callable[[int | None], bool] = lambda _: False) -> None:
        self._ring = ring
        self._grows = grows
        self._makings: dict[HeadKey, dict[TileKey, PooledTile]] = {}

    def fit(self, place: TileRef) -> bool:
        """Return whether the rows of a tile are few, and will not become more; then they are stored, not pooled."""
        is_small = rows_bytes(place.needed) * LARGE_SHARE <= self._ring.limit_bytes
        return is_small and (place.full or not self._grows(None))

    def check(self, place: TileRef) -> None:
        """Raise HttpError 413 for a tile that needs too many chunks, with what fits."""
        most = MAX_CHUNKS * (self._ring.limit_bytes // PIECE_SHARE)
        needed = rows_bytes(place.needed)
        if needed > most:
            text = f"this tile shows {len(place.needed)} queries, whose rows have {needed >> 10} KiB; "
            raise HttpError(413, "too-large", f"{text}{most >> 10} KiB can be read for one", _what_fits(place, most))

    def making(self, head: HeadKey, place: TileRef) -> PooledTile:
        """Return the tile with what it has so far; the memory budget drops it last from now on."""
        key = place.level, place.q, place.k
        tiles = self._makings.setdefault(head, {})
        made = tiles.setdefault(key, PooledTile(place, place.needed.start, place, place.length))
        others_wait = any(tile.waits(place.length) for tile in tiles.values() if tile is not made)
        made.request(place, grows=self._grows(head[0]), others_wait=others_wait)
        self._ring.release(made.ticket)
        made.ticket = self._ring.hold(RetentionClass.ROWS, made.codes.nbytes, lambda: self._forget(head, key, made))
        return made

    def _forget(self, head: HeadKey, key: TileKey, made: PooledTile) -> None:
        if self._makings.get(head, {}).get(key) is made:
            del self._makings[head][key]

    def add(self, head: HeadKey, rows: Iterable[tuple[int, NDArray[Any]]]) -> None:
        """Add rows of a head by position to all its tiles that wait for them."""
        known = dict(rows)
        for made in self._makings.get(head, {}).values():
            made.add(known)

    def next_queries(self, made: PooledTile) -> range:
        """Return the queries to request next: the same for tiles of the same queries that were requested together."""
        queries = made.place.queries
        room = max(1, self._ring.limit_bytes // PIECE_SHARE // queries.stop)
        size = 1 << (room.bit_length() - 1)
        return range(made.next, min(made.next // size * size + size, queries.stop))

    def close(self) -> None:
        """Release the memory of all tiles."""
        for tiles in self._makings.values():
            for made in tiles.values():
                self._ring.release(made.ticket)
        self._makings.clear()


def _what_fits(place: TileRef, most: int) -> str:
    """Suggest what to request instead of a tile that is too large: a finer level, and how far this one reaches."""
    finer = next((level for level in range(place.level - 1, 0, -1) if _fits_at(place, level, most)), 0)
    span = TILE << place.level
    count = 0
    while rows_bytes(range(count * span, (count + 1) * span)) <= most:
        count += 1
    reach = f"; level {place.level} shows queries before {count * span}" if count else ""
    return f"Look closer: level {finer} fits here{reach}."


def _fits_at(place: TileRef, level: int, most: int) -> bool:
    """Return whether the last tile of these queries fits at a finer level."""
    span = TILE << level
    first = (place.queries.stop - 1) // span * span
    return rows_bytes(range(first, min(first + span, place.queries.stop))) <= most
