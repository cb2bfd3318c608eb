"""Numbers on the command line. Every function raises ArgumentTypeError with what to write instead."""

import argparse
import math

MAX_FACTOR = 100.0
"""The tracer's own limit (docs/contracts.md, the control page)."""


def parse_index(text: str) -> int:
    """A rank or a step, counted from 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError("write a whole number from 0 on")
    return int(text)


def parse_count(text: str) -> int:
    """A number of steps."""
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise argparse.ArgumentTypeError("write a whole number from 1 on")
    return int(text)


def parse_factor(text: str) -> float:
    """How many times as long something takes."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 1:
        raise argparse.ArgumentTypeError("write more than 1")
    if value > MAX_FACTOR:
        raise argparse.ArgumentTypeError(f"write at most {MAX_FACTOR:g}")
    return value
