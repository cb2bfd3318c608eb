"""Texts that others wrote, as they may be shown on a terminal."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, overrides of the writing direction, and halves of characters."""


def replace_control_characters(text: str) -> str:
    """The text without what would move, colour or rename a terminal, or show words in another order."""
    return _CONTROL.sub("\ufffd", text)


def to_single_line(text: str) -> str:
    """The same in one line, for a cell of a table."""
    return replace_control_characters(" ".join(re.split(r"[\t\n\r\x0b\x0c\u2028\u2029]+", text)))
