"""Bounded memory for frames and numbers: attention rows are dropped first, then exact numbers, then vectors. Pure.

Each class has a fraction that no other class takes, and what was just added stays: a tile is still there when the page
that caused its probe requests it again, however many vectors there are.

Tokens stay as long as their run; their memory is bounded by the number of runs.
"""

import dataclasses
import enum
from collections.abc import Callable

CLASS_FRACTIONS = 4
"""Denominator of the fraction of all bytes that a class has for itself."""


class RetentionClass(enum.IntEnum):
    """Classes of stored items, in the order in which they are dropped."""

    ROWS = 0
    VALUES = 1
    VECTORS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _HeldItem:
    size: int
    drop: Callable[[], None]


class MemoryBudget:
    """Counts bytes and drops items. `drop` of an item is called once, when its memory is needed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._items: dict[RetentionClass, dict[int, _HeldItem]] = {kind: {} for kind in RetentionClass}
        self._bytes = dict.fromkeys(RetentionClass, 0)
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def hold(self, kind: RetentionClass, size: int, drop: Callable[[], None]) -> int:
        """Make room for `size` bytes; return a ticket for `release`.

        An item of up to half of all bytes always fits; one that does not fit is dropped at once.
        """
        self._next += 1
        self._items[kind][self._next] = _HeldItem(size, drop)
        self._count(kind, size)
        while self.used_bytes > self.limit_bytes:
            self._pop(*(self._next_to_go() or (kind, self._next))).drop()
        return self._next

    def _next_to_go(self) -> tuple[RetentionClass, int] | None:
        """Return class and ticket of the oldest item of the first class above its fraction; None if only the newest is
        left."""
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
        """Release an item; nothing happens if it was dropped already."""
        for kind, items in self._items.items():
            if ticket in items:
                self._pop(kind, ticket)
