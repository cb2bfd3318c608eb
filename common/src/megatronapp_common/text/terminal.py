"""Untrusted texts, made safe for a terminal."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, overrides of the writing direction, and lone surrogates."""


def replace_control_characters(text: str) -> str:
    """Remove characters that would move, colour or rename a terminal, or reorder text."""
    return _CONTROL.sub("\ufffd", text)


def to_single_line(text: str) -> str:
    """Return the text safe for a terminal and in one line, for a cell of a table."""
    return replace_control_characters(" ".join(re.split(r"[\t\n\r\x0b\x0c\u2028\u2029]+", text)))
