"""Principal components of hidden states: few axes that stay the same, so that points can be compared. Pure.

Axes are eigenvectors of the covariance (by singular values of the centred rows). Their sign is fixed: the largest entry
of each is positive. A refit is turned onto the old axes (orthogonal Procrustes; Schönemann 1966), so that points glide
instead of jumping.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.scope.protocol import COMPONENTS

Matrix = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class PcaBasis:
    """Axes of one layer: `mean` [hidden], `axes` [8, hidden], `explained` [8], shares of the variance of the rows that
    they were fitted on. `source`: the run of these rows, and how many tokens its texts had."""

    mean: Matrix
    axes: Matrix
    explained: Matrix
    source: tuple[str, int] = ("", 0)

    def project(self, rows: NDArray[np.floating]) -> Matrix:
        """Return the coordinates [rows, 8]."""
        return np.asarray((rows - self.mean) @ self.axes.T)


def fit(rows: NDArray[np.floating], *, onto: PcaBasis | None = None) -> PcaBasis:
    """Basis of rows [count, hidden], turned onto an older one if given. Axes that the rows do not have are 0."""
    values = np.asarray(rows, dtype=np.float64)
    mean = values.mean(axis=0)
    _, sizes, vectors = np.linalg.svd(values - mean, full_matrices=False)
    kept = min(COMPONENTS, len(sizes))
    axes, variance = np.zeros((COMPONENTS, values.shape[1])), np.zeros(COMPONENTS)
    axes[:kept], variance[:kept] = vectors[:kept], sizes[:kept] ** 2
    axes[variance <= 1e-12 * max(float(variance[0]), 1e-300)] = 0
    axes *= _signs(axes)[:, None]
    total = float((sizes**2).sum()) or 1.0
    if onto is None:
        return PcaBasis(mean, axes, variance / total)
    turn = _rotation(axes, onto.axes)
    return PcaBasis(mean, turn @ axes, (turn**2) @ variance / total)


def total_variance(rows: NDArray[np.floating]) -> float:
    """Sum of the variances of all columns of rows [count, hidden]."""
    return float(np.asarray(rows).var(axis=0, dtype=np.float64).sum())


def _signs(axes: Matrix) -> Matrix:
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)[:, 0]
    return np.where(largest < 0, -1.0, 1.0)


def _rotation(axes: Matrix, old: Matrix) -> Matrix:
    """The rotation (or reflection) of the 8 axes that brings them nearest to the old ones."""
    left, _, right = np.linalg.svd(old @ axes.T)
    return np.asarray(left @ right)
