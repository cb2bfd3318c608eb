"""Robust lines through the anchors of many pairs of clocks at once: a job of 2,048 nodes has thousands of pairs."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

FIT_POINTS = 8
"""Number of anchors from which on a drift is fitted."""
FIT_SECONDS = 1.0
"""Time that these must span."""
HUBER = 1.345
ROUNDS = 8
LEAST_UNCERTAINTY_NS = 1e3
DEVIATION = 1.4826
"""Standard deviation of normal residuals over the median of their absolute values."""

Floats = NDArray[np.float64]
Anchor = tuple[float, float, float]
"""Time in seconds, offset and its uncertainty in ns."""


def offsets_at(windows: Sequence[Collection[Anchor]], time_s: float) -> list[tuple[float, float]]:
    """Return the offset at `time_s` and its uncertainty, in ns, for each window of anchors."""
    found: list[tuple[float, float]] = [(0.0, np.inf)] * len(windows)
    lengths = np.array([len(window) for window in windows])
    for length in np.unique(lengths).tolist():
        places = np.flatnonzero(lengths == length).tolist()
        table = np.array([list(windows[place]) for place in places])
        for place, offset, doubt in zip(places, *_estimate(table, time_s), strict=True):
            found[place] = offset, doubt
    return found


def _estimate(table: Floats, time_s: float) -> tuple[list[float], list[float]]:
    """Estimate windows of one length, [window, anchor, 3]: the best anchor, or a line where the anchors allow one."""
    best = table[np.arange(len(table)), table[:, :, 2].argmin(axis=1)]
    offset, doubt = best[:, 1].copy(), best[:, 2].copy()
    age = table[:, :, 0] - time_s
    fitted = np.flatnonzero(np.ptp(age, axis=1) >= FIT_SECONDS) if table.shape[1] >= FIT_POINTS else np.empty(0, int)
    if len(fitted):
        base = table[fitted, :, 1] - best[fitted, 1:2]
        weight = 1.0 / np.maximum(table[fitted, :, 2], LEAST_UNCERTAINTY_NS)
        now, residual = huber_lines(age[fitted], base, weight)
        error = DEVIATION * np.median(np.abs(residual), axis=1)
        offset[fitted] += now
        doubt[fitted] = np.minimum(doubt[fitted], 3 * error + LEAST_UNCERTAINTY_NS)
    return offset.tolist(), doubt.tolist()


def huber_lines(age: Floats, values: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return the values at age 0 of weighted Huber fits, [line, point], and the residuals.

    By iteratively reweighted least squares; ages of a line must differ.
    """
    current = weight
    for _ in range(ROUNDS):
        total = current.sum(axis=1, keepdims=True)
        mean_age = (current * age).sum(axis=1, keepdims=True) / total
        mean_value = (current * values).sum(axis=1, keepdims=True) / total
        apart = age - mean_age
        slope = (current * apart * (values - mean_value)).sum(axis=1, keepdims=True)
        slope /= (current * apart**2).sum(axis=1, keepdims=True)
        residual = values - mean_value - slope * apart
        scale = DEVIATION * np.median(np.abs(residual), axis=1, keepdims=True) + 1.0
        current = weight * np.minimum(1.0, HUBER * scale / np.maximum(np.abs(residual), 1e-9))
    now: Floats = (mean_value - slope * mean_age)[:, 0]
    return now, residual
