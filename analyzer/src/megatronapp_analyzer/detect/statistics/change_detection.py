"""Sequential test for a lasting shift of a column's mean, in correlated noise.

A generalised likelihood ratio test over windows: for the last 1, 2, 3, ... steps it compares the mean with its standard
error and takes the largest ratio, so that a strong shift is found in a step or two and a weak one after many.
Consecutive steps are not independent: the error of a mean is measured on healthy columns, for each window.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.baseline import MAD_TO_SIGMA
from megatronapp_analyzer.detect.features import Floats, Ints

Mask = NDArray[np.bool_]
WINDOWS = (1, 2, 3, 4, 6, 9, 13, 19, 28, 41, 60, 90)
"""Lengths that are tried, in steps."""
CLIP = 8.0
"""Deviations to which a single value is limited, so that a disturbed step weighs no more than a few others."""
LARGEST_ERROR = 2.0
RECENT = 4
"""Newest steps that must agree with a shift for it to be there now."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """Result of a test, by column."""

    score: Floats
    """Largest ratio of a window's mean to its standard error; 0 without values."""
    lowest: Floats
    """Smallest of these ratios: far below 0 where a column is faster than expected, or the others are slower."""
    window: Ints
    """Length of that window."""
    size: Floats
    """Median over that window."""
    present: Mask
    """True if the newest steps agree with the shift: it is not over."""
    means: Floats
    """[window, column] means in deviations of a step; NaN where a column has fewer values."""


class MeanErrors:
    """Standard errors of means over the windows, in deviations of a step.

    Measured in each step by the median over columns, so that a few faulty ones do not matter, and forgotten slowly.
    """

    MEMORY, PRIOR = 0.99, 20.0
    PRIOR_CORRELATION = 0.6

    def __init__(self) -> None:
        lengths = np.array(WINDOWS)
        self._squares = self.PRIOR * error_of_mean(lengths, self.PRIOR_CORRELATION) ** 2
        self._weights = np.full(len(WINDOWS), self.PRIOR)
        self._least = 1.0 / np.sqrt(lengths)

    def add(self, means: Floats) -> None:
        """Add the means of a step, [window, column]; NaN where they are unknown."""
        known = np.isfinite(means).any(axis=1)
        if known.any():
            middle = MAD_TO_SIGMA * np.nanmedian(np.abs(means[known]), axis=1)
            self._squares[known] = self.MEMORY * self._squares[known] + np.minimum(middle, LARGEST_ERROR) ** 2
            self._weights[known] = self.MEMORY * self._weights[known] + 1.0

    @property
    def value(self) -> Floats:
        """Error of each window; never below that of independent steps."""
        out: Floats = np.maximum(np.sqrt(self._squares / self._weights), self._least)
        return out

    def over(self, steps: Ints) -> Floats:
        """Return the error of means over any number of steps; above the longest window it falls with their root."""
        longest = WINDOWS[-1]
        inside = np.interp(np.clip(steps, 1, longest), WINDOWS, self.value)
        out: Floats = inside * np.sqrt(longest / np.maximum(steps, longest))
        return out


def error_of_mean(steps: Ints, correlation: float) -> Floats:
    """Return the same for a process of first order with this correlation from step to step."""
    lags = np.arange(1, int(steps.max()) + 1, dtype=np.float64)
    sums, weighted = np.cumsum(correlation**lags), np.cumsum(lags * correlation**lags)
    inside = np.maximum(steps - 2, 0)
    extra = np.where(steps > 1, sums[inside] - weighted[inside] / steps, 0.0)
    out: Floats = np.sqrt((1.0 + 2.0 * extra) / steps)
    return out


class RecentValues:
    """The newest values of each column. A step in which a column is unknown is not counted for it."""

    def __init__(self, columns: int) -> None:
        self._values = np.zeros((WINDOWS[-1], columns))
        self._count = np.zeros(columns, np.int64)

    def add(self, values: Floats) -> None:
        """Add the finite values of a step."""
        known = np.isfinite(values)
        if known.all():
            self._values[1:] = self._values[:-1]
            self._values[0] = values
        else:
            self._values[1:, known] = self._values[:-1, known]
            self._values[0, known] = values[known]
        self._count += known

    def grow(self, columns: int) -> None:
        """Add columns without values up to `columns`."""
        missing = columns - len(self._count)
        self._values = np.pad(self._values, ((0, 0), (0, missing)))
        self._count = np.pad(self._count, (0, missing))

    def test(self, deviation: Floats, errors: MeanErrors, bias: Floats) -> Shift:
        """Look for a shift upwards.

        `deviation`: of a single step, by column. `bias`: standard error of what the values are compared with.
        """
        offset = bias / deviation
        limit = CLIP * np.sqrt(1.0 + offset**2)
        sums = np.cumsum(np.clip(self._values / deviation, -limit, limit), axis=0)
        lengths = np.array(WINDOWS)
        filled = lengths[:, None] <= self._count
        means = np.where(filled, sums[lengths - 1] / lengths[:, None], np.nan)
        ratios = means / np.sqrt(errors.value[:, None] ** 2 + offset**2)
        scores = np.where(filled, ratios, -np.inf)
        best = scores.argmax(axis=0)
        score = scores[best, np.arange(len(best))]
        size = self._medians(lengths[best])
        steps = np.minimum(lengths[best], RECENT)
        return Shift(
            score=np.where(np.isfinite(score), score, 0.0),
            lowest=np.where(filled, ratios, 0.0).min(axis=0),
            window=lengths[best],
            size=size,
            present=self._is_recent(size, steps, deviation, errors),
            means=means,
        )

    def _medians(self, window: Ints) -> Floats:
        out = np.zeros(len(window))
        for length in np.unique(window):
            columns = np.flatnonzero(window == length)
            out[columns] = np.median(self._values[:length, columns], axis=0)
        return out

    def _is_recent(self, size: Floats, steps: Ints, deviation: Floats, errors: MeanErrors) -> Mask:
        """Return columns whose newest steps, 1, 2 and more of them, are not clearly below half of the shift."""
        mean = np.cumsum(self._values[:RECENT], axis=0)[steps - 1, np.arange(len(size))] / steps
        present: Mask = (mean > 0.5 * size - 2.0 * deviation * errors.over(steps)) & (mean > 0)
        present &= self._values[0] > 0.5 * size - 2.0 * deviation
        present &= (steps < 2) | (self._values[:2].mean(axis=0) > 0.5 * size - 1.4 * deviation)
        return present
