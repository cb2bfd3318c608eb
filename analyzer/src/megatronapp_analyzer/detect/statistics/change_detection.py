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
PRIOR_CORRELATION = 0.8
"""Correlation from step to step that is assumed before it is measured.

Long windows are measured last. A correlation that is too small makes their means look certain, and healthy ranks that
are slower for some steps look faulty. A pace that wanders by 0.4 % with the correlation of recorded devices, 0.93,
and by 0.5 % at random in each step, has 1.0 to 1.3 times the errors of 0.8 in windows of 2 to 60 steps, and 1.1 to 1.9
times those of 0.6.
"""


def error_of_mean(steps: Ints, correlation: float) -> Floats:
    """Return the same for a process of first order with this correlation from step to step."""
    lags = np.arange(1, int(steps.max()) + 1, dtype=np.float64)
    sums, weighted = np.cumsum(correlation**lags), np.cumsum(lags * correlation**lags)
    inside = np.maximum(steps - 2, 0)
    extra = np.where(steps > 1, sums[inside] - weighted[inside] / steps, 0.0)
    out: Floats = np.sqrt((1.0 + 2.0 * extra) / steps)
    return out
