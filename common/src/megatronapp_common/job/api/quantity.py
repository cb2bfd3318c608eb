"""Quantities as Kubernetes writes them: 4, 500m, 16Gi."""

import fractions
import re
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

QUANTITY_PATTERN = r"^([0-9]+([.][0-9]*)?|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?$"
MAX_QUANTITY_LENGTH = 32
_TEN = dict(zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True))
_TWO = {f"{prefix}i": 10 * place for place, prefix in enumerate("KMGTPE", start=1)}
_PARTS = re.compile(r"([0-9.]+)(.*)")


def _as_text(value: object) -> object:
    """Return whole numbers as text, because Kubernetes needs no quotes for them."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    Field(min_length=1, max_length=MAX_QUANTITY_LENGTH, pattern=QUANTITY_PATTERN),
    BeforeValidator(_as_text),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maxLength": MAX_QUANTITY_LENGTH,
            "pattern": QUANTITY_PATTERN,
        }
    ),
]
"""Text of a quantity, never negative; a whole number becomes text."""


MEMORY_CAP_PATTERN = r"^[1-9][0-9]{0,9}([KMGT]i)?$"
_MAX_MEMORY_CAP_LENGTH = 12
MemoryCap = Annotated[
    str,
    Field(min_length=1, max_length=_MAX_MEMORY_CAP_LENGTH, pattern=MEMORY_CAP_PATTERN),
    BeforeValidator(_as_text),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 1,
            "maxLength": _MAX_MEMORY_CAP_LENGTH,
            "pattern": MEMORY_CAP_PATTERN,
        }
    ),
]
"""Text of a number of microbatches, or of bytes with a suffix; a whole number becomes text."""


def quantity_value(text: str) -> fractions.Fraction:
    """Return the value of a quantity in its base unit (bytes, cores). Raises ValueError for any other text."""
    if not re.match(QUANTITY_PATTERN, text):
        raise ValueError(f"{text!r} is no quantity; write one such as 4, 500m or 16Gi")
    found = _PARTS.match(text)
    assert found is not None
    number, suffix = found[1], found[2]
    worth = fractions.Fraction(number if number[-1] != "." else number[:-1])
    if suffix in _TWO:
        return worth * (1 << _TWO[suffix])
    exponent = _TEN[suffix] if suffix in _TEN else int(suffix[1:] or 0)
    power = fractions.Fraction(10 ** abs(exponent))
    return worth * power if exponent >= 0 else worth / power
