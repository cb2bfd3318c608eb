"""Sizes of memory as text, such as 8GiB."""

import re

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([1-9][0-9]{0,9})([KMGT]i)B?")
LEAST_NUMBER = 100
"""Least whole number of a unit: below it a smaller unit is written."""


def bytes_of(text: str) -> int | None:
    """Return the bytes of a size such as 8GiB, or 8Gi as Kubernetes writes it; None for any other text."""
    found = _SIZE.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS[f"{found[2]}B"]


def bytes_text(size: int) -> str:
    """Return the text of a size, rounded up to a whole number of a unit that is at least a hundred, or of KiB."""
    unit, scale = "KiB", _UNITS["KiB"]
    for name, value in _UNITS.items():
        if size >= LEAST_NUMBER * value:
            unit, scale = name, value
    return f"{-(-size // scale)}{unit}"
