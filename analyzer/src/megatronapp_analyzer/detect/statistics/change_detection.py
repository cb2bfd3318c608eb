"""Sequential test for a lasting shift of a column's mean, in correlated noise.

A generalised likelihood ratio test over windows: for the last 1, 2, 3, ... steps it compares the mean with its standard
error and takes the largest ratio, so that a strong shift is found in a step or two and a weak one after many.
Consecutive steps are not independent: the error of a mean is measured on healthy columns, for each window.

`ColumnTest` of megatronapp_native computes it; the plain form is tests/support/traces/plain_references.py.
"""

import numpy as np

from megatronapp_analyzer.detect.features import Floats, Ints

WINDOWS = (1, 2, 3, 4, 6, 9, 13, 19, 28, 41, 60, 90)
"""Lengths that are tried, in steps; also in csrc/include/megatronapp/detect/column_test.hpp."""
PRIOR_CORRELATION = 0.6
"""Correlation from step to step that is assumed before it is measured."""


def error_of_mean(steps: Ints, correlation: float) -> Floats:
    """Return the same for a process of first order with this correlation from step to step."""
    lags = np.arange(1, int(steps.max()) + 1, dtype=np.float64)
    sums, weighted = np.cumsum(correlation**lags), np.cumsum(lags * correlation**lags)
    inside = np.maximum(steps - 2, 0)
    extra = np.where(steps > 1, sums[inside] - weighted[inside] / steps, 0.0)
    out: Floats = np.sqrt((1.0 + 2.0 * extra) / steps)
    return out
