"""Robust references for columns of numbers (ranks, units, links): a column's own history, and the other columns."""

import math

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_native import column_medians
from megatronapp_native import median_of_others as native_median_of_others

Mask = NDArray[np.bool_]
MAD_TO_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""


LARGEST = float(np.finfo(np.float64).max)


def filled(values: Floats, value: float = 0.0) -> Floats:
    """Return the values with `value` in place of NaN, and the largest numbers in place of infinite ones.

    As numpy.nan_to_num, to the last bit, in a fraction of its time for a few columns.
    """
    out: Floats = np.minimum(np.maximum(values, -LARGEST), LARGEST)
    out[np.isnan(values)] = value
    return out


def median_of_known(values: Floats) -> float:
    """Return the median of the values that are not NaN; NaN without any.

    As numpy.nanmedian of one dimension, to the last bit, in a fraction of its time for a few columns.
    """
    known = np.sort(values[~np.isnan(values)])
    middle = len(known) // 2
    if not len(known):
        return math.nan
    return float(known[middle]) if len(known) % 2 else float((known[middle - 1] + known[middle]) / 2.0)


class ColumnHistory:
    """The last `window` accepted values of each column; columns fill independently."""

    def __init__(self, columns: int, window: int) -> None:
        self._values = np.full((window, columns), np.nan)
        self._next = np.zeros(columns, np.int64)

    def add(self, values: Floats, accepted: Mask) -> None:
        """Add the accepted finite values to the history."""
        columns = np.flatnonzero(accepted & np.isfinite(values))
        self._values[self._next[columns] % len(self._values), columns] = values[columns]
        self._next[columns] += 1

    @property
    def count(self) -> Ints:
        """Number of values in each column's history."""
        return np.minimum(self._next, len(self._values))

    def median(self) -> Floats:
        """Median of each column; NaN where it is empty."""
        return column_medians(self._filled)

    def deviation(self) -> Floats:
        """Robust standard deviation of each column around its median."""
        return MAD_TO_SIGMA * column_medians(np.abs(self._filled - self.median()))

    @property
    def _filled(self) -> Floats:
        """The rows in which some column has a value."""
        return self._values[: int(self._next.max(initial=0))]

    def grow(self, columns: int) -> None:
        """Add empty columns up to `columns`."""
        missing = columns - self._values.shape[1]
        if missing > 0:
            self._values = np.pad(self._values, ((0, 0), (0, missing)), constant_values=np.nan)
            self._next = np.pad(self._next, (0, missing))


def median_of_others(values: Floats) -> Floats:
    """Return for each finite value the lower median of the other finite ones; NaN without any other. O(n)."""
    return median_of_others_by(values, np.zeros(len(values), np.int64))


def median_of_others_by(values: Floats, group: Ints) -> Floats:
    """As `median_of_others`, within each group; groups are numbered from -1 or 0 on."""
    return native_median_of_others(values, group)
