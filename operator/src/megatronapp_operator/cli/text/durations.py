"""Durations in the format of kubectl."""

import argparse
import re

UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_WHOLE = re.compile(r"(-)?((?:\d+(?:\.\d+)?(?:ms|h|m|s))+)")


def parse_duration(text: str) -> float:
    """Parse seconds from a text such as 90s, 1h30m, -1s, or a plain number. Raises ArgumentTypeError."""
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return float(text)
    found = _WHOLE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write it as 30s, 10m or 1h30m")
    seconds = sum(float(number) * UNITS_S[unit] for number, unit in _PART.findall(found[2]))
    return -seconds if found[1] else seconds


MINUTE_S, HOUR_S, DAY_S, YEAR_S = 60, 3600, 86400, 365 * 86400
STEPS = (
    # below this age in seconds: the large unit, and the small one after it (0: none)
    (2 * MINUTE_S, 1, 0),
    (10 * MINUTE_S, MINUTE_S, 1),
    (3 * HOUR_S, MINUTE_S, 0),
    (8 * HOUR_S, HOUR_S, MINUTE_S),
    (2 * DAY_S, HOUR_S, 0),
    (8 * DAY_S, DAY_S, HOUR_S),
    (2 * YEAR_S, DAY_S, 0),
    (float("inf"), YEAR_S, DAY_S),
)
SIGNS = {1: "s", MINUTE_S: "m", HOUR_S: "h", DAY_S: "d", YEAR_S: "y"}


def human_duration(seconds: float) -> str:
    """Format an age in at most two units, coarser the older it is (as in kubectl's AGE column)."""
    whole = max(0, int(seconds))
    large, small = next((large, small) for below, large, small in STEPS if whole < below)
    text = f"{whole // large}{SIGNS[large]}"
    rest = whole % large // small if small else 0
    return f"{text}{rest}{SIGNS[small]}" if rest else text
