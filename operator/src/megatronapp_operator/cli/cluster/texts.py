"""Texts of a cluster, which hubs, launchers and others wrote, as they may be shown on a terminal."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """The text without control characters but newlines and tabs: they would move, colour or rename a terminal."""
    return _CONTROL.sub("\ufffd", text)
