"""Reading a document that may hold anything: a value of a wrong shape counts as absent."""

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatronapp_operator.plan_io.times import seconds_of

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading a document of a wrong shape raises."""

Value = TypeVar("Value")
Word = TypeVar("Word", bound=enum.StrEnum)

MAX_NUMBERS = 1 << 16
"""More numbers than this in one range are a mistake of somebody's hand, not workers."""


class FieldReader:
    """A block of a document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def read(self, name: str, reader: Callable[[Any], Value]) -> Value | None:
        """What `reader` makes of the field; None if it is absent or cannot be read."""
        given = self._document.get(name)
        if given is None:
            return None
        try:
            return reader(given)
        except UNREADABLE:
            return None

    def block(self, name: str) -> "FieldReader":
        """A block in this one; an empty one if there is none."""
        return self.read(name, _fields) or FieldReader({})

    def items(self, name: str, reader: Callable[["FieldReader"], Value | None]) -> tuple[Value, ...]:
        """What `reader` makes of the blocks of a list; items of which it makes nothing are left out."""
        blocks = self.read(name, lambda given: [FieldReader(one) for one in given if isinstance(one, Mapping)]) or []
        return tuple(found for one in blocks if (found := reader(one)) is not None)

    def choice(self, name: str, kind: type[Word]) -> Word | None:
        """One of a list of words."""
        return self.read(name, kind)

    def optional_text(self, name: str) -> str | None:
        """A text, if it is there and not empty."""
        return self.text(name) or None

    def text(self, name: str) -> str:
        """A text; empty if it is absent."""
        given = self._document.get(name)
        return given if isinstance(given, str) else ""

    def flag(self, name: str) -> bool:
        """Whether the field is true."""
        return self._document.get(name) is True

    def number(self, name: str) -> int | None:
        """A whole number."""
        return self.read(name, int)

    def count(self, name: str) -> int:
        """A number from 0; 0 if it is absent."""
        return max(0, self.number(name) or 0)

    def real(self, name: str) -> float | None:
        """A finite number."""
        found = self.read(name, float)
        return found if found is not None and math.isfinite(found) else None

    def time(self, name: str) -> float | None:
        """A time as seconds since the epoch."""
        return self.read(name, seconds_of)

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        return self.optional_numbers(name) or ()

    def optional_numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None if it is absent."""
        return self.read(name, lambda given: tuple(int(one) for one in given))


def numbers_of(text: str) -> tuple[int, ...]:
    """The numbers of a text like "0-3,7"; parts that say nothing are left out."""
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
