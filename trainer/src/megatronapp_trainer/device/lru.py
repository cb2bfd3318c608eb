"""Cache of the values that were used last, with a limit of their number."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most `most` values by key. The least recently used one is dropped first; `forget` is called for each."""

    def __init__(self, most: int, forget: Callable[[K, V], None] = lambda _key, _value: None) -> None:
        self._most = most
        self._forget = forget
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, making it if it is absent."""
        if key not in self._values:
            while len(self._values) >= self._most:
                self._drop(next(iter(self._values)))
            self._values[key] = make()
        self._values[key] = self._values.pop(key)
        return self._values[key]

    def drop(self, unwanted: Callable[[K], bool] = lambda _key: True) -> None:
        """Drop the unwanted keys; by default all of them."""
        for key in [key for key in self._values if unwanted(key)]:
            self._drop(key)

    @property
    def order(self) -> list[K]:
        """Return the keys, the least recently used one first."""
        return list(self._values)

    def _drop(self, key: K) -> None:
        self._forget(key, self._values.pop(key))
