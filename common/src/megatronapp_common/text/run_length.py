"""Run-length lists of counts: 8x1000 for a thousand times 8, and 8x2,4 for 8, 8, 4."""

import itertools
import re
from collections.abc import Sequence

LONGEST = 1 << 17
_RUN = re.compile(r"([1-9][0-9]{0,8})(?:x([1-9][0-9]{0,8}))?", re.ASCII)


def format_run_lengths(counts: Sequence[int]) -> str:
    """Format positive counts in the short form."""
    runs = ((value, len(list(same))) for value, same in itertools.groupby(counts))
    return ",".join(str(value) if times == 1 else f"{value}x{times}" for value, times in runs)


def parse_run_lengths(text: str) -> tuple[int, ...]:
    """Parse a short form, or a list with each count written out. Raises ValueError."""
    found: list[int] = []
    for run in text.split(","):
        match = _RUN.fullmatch(run)
        times = int(match[2] or 1) if match else 0
        if match is None or len(found) + times > LONGEST:
            raise ValueError(f"{run!r} is no count such as 8 or 8x2, or there are more than {LONGEST}")
        found += itertools.repeat(int(match[1]), times)
    return tuple(found)
