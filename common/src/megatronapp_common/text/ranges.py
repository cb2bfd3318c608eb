"""Sets of numbers as text: "0-3,7" (the form of a Job's completedIndexes)."""

import itertools
from collections.abc import Iterable

MAX_NUMBERS = 1 << 16
"""Most numbers of one range: a larger range is a typing error, not a list of workers."""


def format_ranges(numbers: Iterable[int]) -> str:
    """Return the text of rising numbers."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(parts)


def parse_ranges(text: object) -> tuple[int, ...]:
    """Parse the numbers of a text; parts of another form are ignored."""
    found: set[int] = set()
    for part in text.split(",") if isinstance(text, str) else ():
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            numbers = range(int(first), int(last or first) + 1)
            found.update(numbers[:MAX_NUMBERS])
    return tuple(sorted(found))
