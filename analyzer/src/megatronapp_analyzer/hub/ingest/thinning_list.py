"""A list that never grows past its capacity: when full it drops every second item of its older half."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ThinningList(Generic[T]):
    """List that is only appended to; the newest `capacity` / 2 items are always whole, the older the sparser."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: list[T] = []

    def append(self, item: T) -> None:
        """Add the newest item."""
        self._items.append(item)
        if len(self._items) > self._capacity:
            half = (len(self._items) + 1) // 2
            self._items[:half] = self._items[:half:2]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def newest(self) -> T | None:
        """Return the last item; None if the list is empty."""
        return self._items[-1] if self._items else None

    def tail(self, count: int) -> list[T]:
        """Return the newest `count` items, oldest first."""
        return self._items[-count:] if count > 0 else []
