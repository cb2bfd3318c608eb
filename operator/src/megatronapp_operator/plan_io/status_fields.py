"""Access to a document that may hold anything: a value of a wrong shape is treated as absent."""

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatronapp_operator.plan_io.times import seconds_of

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions from reading a document of a wrong shape."""

Value = TypeVar("Value")
Word = TypeVar("Word", bound=enum.StrEnum)

MAX_NUMBERS = 1 << 16
"""Most numbers of one range: a larger range is a typing error, not a list of workers."""


class FieldReader:
    """One block of a document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def read(self, name: str, reader: Callable[[Any], Value]) -> Value | None:
        """Return the result of `reader` for the field; None if it is absent or cannot be read."""
        given = self._document.get(name)
        if given is None:
            return None
        try:
            return reader(given)
        except UNREADABLE:
            return None

    def block(self, name: str) -> "FieldReader":
        """Return a nested block; an empty one if it is absent."""
        return self.read(name, _fields) or FieldReader({})

    def items(self, name: str, reader: Callable[["FieldReader"], Value | None]) -> tuple[Value, ...]:
        """Return the results of `reader` for the blocks of a list, without those that are None."""
        blocks = self.read(name, lambda given: [FieldReader(one) for one in given if isinstance(one, Mapping)]) or []
        return tuple(found for one in blocks if (found := reader(one)) is not None)

    def choice(self, name: str, kind: type[Word]) -> Word | None:
        """Return a member of an enumeration; None if it is absent or unknown."""
        return self.read(name, kind)

    def optional_text(self, name: str) -> str | None:
        """Return a text that is not empty, or None."""
        return self.text(name) or None

    def text(self, name: str) -> str:
        """Return a text; empty if it is absent."""
        given = self._document.get(name)
        return given if isinstance(given, str) else ""

    def flag(self, name: str) -> bool:
        """Return True if the field is true."""
        return self._document.get(name) is True

    def number(self, name: str) -> int | None:
        """Return an integer, or None if it is absent or cannot be read."""
        return self.read(name, int)

    def count(self, name: str) -> int:
        """Return an integer from 0; 0 if it is absent."""
        return max(0, self.number(name) or 0)

    def real(self, name: str) -> float | None:
        """Return a finite number, or None if it is absent or cannot be read."""
        found = self.read(name, float)
        return found if found is not None and math.isfinite(found) else None

    def time(self, name: str) -> float | None:
        """Return a time as seconds since the epoch, or None if it is absent or cannot be read."""
        return self.read(name, seconds_of)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; empty if it is absent or cannot be read."""
        return self.optional_numbers(name) or ()

    def optional_numbers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers, or None if it is absent or cannot be read."""
        return self.read(name, lambda given: tuple(int(one) for one in given))


def numbers_of(text: str) -> tuple[int, ...]:
    """Parse numbers from a text like "0-3,7"; parts of another form are ignored."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            numbers = range(int(first), int(last or first) + 1)
            found.update(numbers[:MAX_NUMBERS])
    return tuple(sorted(found))


def _fields(given: Any) -> FieldReader:  # noqa: ANN401 - a field of a document
    if not isinstance(given, Mapping):
        raise TypeError
    return FieldReader(given)
