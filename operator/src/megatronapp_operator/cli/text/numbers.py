"""Parsers of numbers on the command line. Each raises ArgumentTypeError that says what to write instead."""

import argparse
import math

MAX_FACTOR = 100.0
"""Limit of the tracer (docs/contracts.md, the control document)."""


def parse_index(text: str) -> int:
    """Parse a rank or a step, counted from 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError("write a whole number, 0 or more")
    return int(text)


def parse_count(text: str) -> int:
    """Parse a number from 1."""
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise argparse.ArgumentTypeError("write a whole number, 1 or more")
    return int(text)


def parse_factor(text: str) -> float:
    """Parse a slowdown factor above 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 1:
        raise argparse.ArgumentTypeError("write a number above 1")
    if value > MAX_FACTOR:
        raise argparse.ArgumentTypeError(f"write at most {MAX_FACTOR:g}")
    return value
