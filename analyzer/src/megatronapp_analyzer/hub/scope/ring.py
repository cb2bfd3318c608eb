"""What is kept, in bounded bytes: when full, attention rows go first, then exact numbers, then vectors. Pure.

Tokens stay as long as their run, which is bounded by the number of runs.
"""

import dataclasses
import enum
from collections.abc import Callable


class Held(enum.IntEnum):
    """Classes of what is held, in the order in which they go."""

    ROWS = 0
    VALUES = 1
    VECTORS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    size: int
    drop: Callable[[], None]


class Ring:
    """Counts bytes and lets go. `drop` of an item is called once, when its room is needed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._items: dict[Held, dict[int, _Item]] = {kind: {} for kind in Held}
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def hold(self, kind: Held, size: int, drop: Callable[[], None]) -> int:
        """Make room for `size` bytes; returns a ticket for `release`. What is too large by itself goes at once."""
        self._next += 1
        self._items[kind][self._next] = _Item(size, drop)
        self.used_bytes += size
        while self.used_bytes > self.limit_bytes and len(self):
            self._drop_oldest()
        return self._next

    def _drop_oldest(self) -> None:
        items = next(items for items in self._items.values() if items)
        item = items.pop(next(iter(items)))
        self.used_bytes -= item.size
        item.drop()

    def release(self, ticket: int) -> None:
        """What this ticket was for is not held any more; nothing happens if it went already."""
        for items in self._items.values():
            if (item := items.pop(ticket, None)) is not None:
                self.used_bytes -= item.size
