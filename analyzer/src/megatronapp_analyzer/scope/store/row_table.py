"""Rows of numbers by key and position, as long as the memory budget has room for them. Pure."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget, RetentionClass

K = TypeVar("K")


@dataclasses.dataclass(slots=True)
class RowTable(Generic[K]):
    """Arrays by key and position. A newer array replaces an older one."""

    ring: MemoryBudget
    kind: RetentionClass
    _rows: dict[K, dict[int, NDArray[Any]]] = dataclasses.field(default_factory=dict)
    _tickets: list[int] = dataclasses.field(default_factory=list)

    def put(self, key: K, positions: Iterable[int], rows: NDArray[Any]) -> None:
        """Store a block of rows; they share one array, and are dropped together."""
        placed = list(zip(positions, rows, strict=True))
        self.point(key, placed)
        self._tickets.append(self.ring.hold(self.kind, rows.nbytes, self.forgetter([(key, placed)])))

    def point(self, key: K, placed: Iterable[tuple[int, NDArray[Any]]]) -> None:
        """Add rows whose memory is accounted for elsewhere."""
        self._rows.setdefault(key, {}).update(placed)

    def forgetter(self, blocks: Iterable[tuple[K, list[tuple[int, NDArray[Any]]]]]) -> Callable[[], None]:
        """Return a function that removes these rows, except where newer ones have replaced them."""

        def forget() -> None:
            for key, placed in blocks:
                known = self._rows.get(key, {})
                for position, row in placed:
                    if known.get(position) is row:
                        del known[position]

        return forget

    def get(self, key: K) -> dict[int, NDArray[Any]]:
        """Return rows of a key by position; they must not be changed."""
        return self._rows.get(key, {})

    def stored_keys(self) -> list[K]:
        """Return all keys with rows."""
        return [key for key, rows in self._rows.items() if rows]

    def close(self) -> None:
        """Release the memory of all rows."""
        for ticket in self._tickets:
            self.ring.release(ticket)
        self._rows.clear()
