"""Reducers of a pixel's vector to numbers: by name, histograms, and users' own filters. All are texts."""

import dataclasses
import re

import numpy as np

from megatronapp_common.errors import FilterError
from megatronapp_common.filters.expression import Expression, parse
from megatronapp_common.filters.syntax import DataVector, Reduce, Reduction

MAX_BINS = 256
NAMED = {
    "mean": parse("data.mean()"),
    "absmax": parse("data.abs().max()"),
    "rms": parse("data.square().mean().sqrt()"),
    "std": Expression(Reduce(Reduction.STD, DataVector())),
    "min": parse("data.min()"),
    "max": parse("data.max()"),
}
HISTOGRAM = "histogram"
NAMES = (*NAMED, HISTOGRAM)
_NUMBER = r"\s*([+-]?(?:[0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})(?:[eE][+-]?[0-9]{1,3})?)\s*"
_HISTOGRAM = re.compile(rf"\s*histogram\s*\(\s*([0-9]{{1,6}})\s*,{_NUMBER},{_NUMBER}\)\s*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of a pixel's numbers in each of `bins` equal parts of [lo, hi], `hi` included.

    Numbers outside, and NaN, are not counted: the sum of the bins shows how many they are.
    """

    bins: int
    lo: float
    hi: float

    def __str__(self) -> str:
        """Return the text that `parse_reducer` reads."""
        return f"histogram({self.bins}, {np.float32(self.lo)!s}, {np.float32(self.hi)!s})"

    @property
    def scale(self) -> float:
        """Bins per unit, as a 32-bit float."""
        return float(np.float32(self.bins) / (np.float32(self.hi) - np.float32(self.lo)))


Reducer = Expression | Histogram


def parse_reducer(text: str) -> Reducer:
    """Parse a name of `NAMES` (histogram with its numbers), or a filter. Raises FilterError, and no other error."""
    named = NAMED.get(text.strip())
    if named is not None:
        return named
    if re.match(r"\s*histogram\b", text):
        return _histogram(text)
    return parse(text)


def _histogram(text: str) -> Histogram:
    found = _HISTOGRAM.fullmatch(text)
    if found is None:
        raise FilterError(1, "a histogram has bins, lowest and highest number; write histogram(32, -4, 4)")
    bins = int(found[1])
    if not 1 <= bins <= MAX_BINS:
        raise FilterError(found.start(1) + 1, f"{bins} bins are not possible; write 1 to {MAX_BINS}")
    with np.errstate(all="ignore"):
        lo, hi = np.float32(found[2]), np.float32(found[3])
        usable = lo < hi and np.isfinite(np.float32(bins) / (hi - lo)) and np.isfinite(hi - lo)
    if not usable:
        raise FilterError(found.start(2) + 1, "the lowest number is first; write histogram(32, -4, 4)")
    return Histogram(bins=bins, lo=float(lo), hi=float(hi))
