"""What was asked for last, and no more of it than fits."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most `most` values by key. The one that was asked for longest ago goes first; `forget` hears of each."""

    def __init__(self, most: int, forget: Callable[[K, V], None] = lambda _key, _value: None) -> None:
        self._most = most
        self._forget = forget
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made where it is not there."""
        if key not in self._values:
            while len(self._values) >= self._most:
                self._drop(next(iter(self._values)))
            self._values[key] = make()
        self._values[key] = self._values.pop(key)
        return self._values[key]

    def drop(self, unwanted: Callable[[K], bool] = lambda _key: True) -> None:
        """Forget these keys; all of them where nothing is said."""
        for key in [key for key in self._values if unwanted(key)]:
            self._drop(key)

    @property
    def order(self) -> list[K]:
        """Keys that are there, the one that was asked for longest ago first."""
        return list(self._values)

    def _drop(self, key: K) -> None:
        self._forget(key, self._values.pop(key))
