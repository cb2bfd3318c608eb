"""What is kept, in bounded bytes: when full, attention rows go first, then exact numbers, then vectors. Pure.

Each class has a share that no other takes from it, and what has just come stays: whoever asks for a tile finds it there
once the model has brought it, however many vectors there are.

Tokens stay as long as their run, which is bounded by the number of runs.
"""

import dataclasses
import enum
from collections.abc import Callable

CLASS_FRACTIONS = 4
"""A class has one in so many of all bytes for itself."""


class RetentionClass(enum.IntEnum):
    """Classes of what is held, in the order in which they go."""

    ROWS = 0
    VALUES = 1
    VECTORS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _HeldItem:
    size: int
    drop: Callable[[], None]


class MemoryBudget:
    """Counts bytes and lets go. `drop` of an item is called once, when its room is needed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._items: dict[RetentionClass, dict[int, _HeldItem]] = {kind: {} for kind in RetentionClass}
        self._bytes = dict.fromkeys(RetentionClass, 0)
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def hold(self, kind: RetentionClass, size: int, drop: Callable[[], None]) -> int:
        """Make room for `size` bytes; returns a ticket for `release`. Up to half of all bytes always find room.

        What finds none goes at once.
        """
        self._next += 1
        self._items[kind][self._next] = _HeldItem(size, drop)
        self._count(kind, size)
        while self.used_bytes > self.limit_bytes:
            self._pop(*(self._next_to_go() or (kind, self._next))).drop()
        return self._next

    def _next_to_go(self) -> tuple[RetentionClass, int] | None:
        """The oldest of the first class that has more than its share. None: there is only what has just come."""
        for kind, items in self._items.items():
            oldest = next(iter(items), self._next)
            if self._bytes[kind] * CLASS_FRACTIONS > self.limit_bytes and oldest != self._next:
                return kind, oldest
        return None

    def _pop(self, kind: RetentionClass, ticket: int) -> _HeldItem:
        item = self._items[kind].pop(ticket)
        self._count(kind, -item.size)
        return item

    def _count(self, kind: RetentionClass, added_bytes: int) -> None:
        self._bytes[kind] += added_bytes
        self.used_bytes += added_bytes

    def release(self, ticket: int) -> None:
        """What this ticket was for is not held any more; nothing happens if it went already."""
        for kind, items in self._items.items():
            if ticket in items:
                self._pop(kind, ticket)
