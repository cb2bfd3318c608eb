"""Persistence: how many of the last steps were evidence against a column, and how certain that is."""

import math

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask
from megatronapp_analyzer.detect.features import Ints

HEALTHY_RATE = 0.01
"""Assumed share of healthy steps in which a column is over its threshold."""
FAULTY_RATE = 0.9
"""Assumed share of faulty steps in which it is."""
DISCOUNT = 0.5
"""Exponent of the likelihood ratio: steps in a row are not independent, so their joint evidence is halved."""


class VoteWindow:
    """Window of the last judgements of each column. A step in which a column is unknown is not counted for it."""

    def __init__(self, columns: int, window: int) -> None:
        self._ring = np.zeros((window, columns), np.bool_)

    def add(self, over: Mask, known: Mask) -> None:
        """Add the judgement of one step."""
        if known.all():  # the usual case, which needs no choice of columns
            self._ring[1:] = self._ring[:-1]
            self._ring[0] = over
            return
        self._ring[1:, known] = self._ring[:-1, known]
        self._ring[0, known] = over[known]

    @property
    def columns(self) -> int:
        """Return the number of columns."""
        return int(self._ring.shape[1])

    @property
    def count(self) -> Ints:
        """Number of votes of each column."""
        count: Ints = self._ring.sum(axis=0)
        return count

    def grow(self, columns: int) -> None:
        """Add columns without votes up to `columns`."""
        missing = columns - self._ring.shape[1]
        if missing > 0:
            self._ring = np.pad(self._ring, ((0, 0), (0, missing)))


def confidence(votes: int, steps: int, columns: int) -> float:
    """Return the probability that a column with `votes` in `steps` is faulty, if one of `columns` is as likely as not.

    Binomial likelihood ratio of the two rates above, discounted, against a prior of 1 / columns.
    """
    misses = max(steps - votes, 0)
    log_ratio = votes * math.log(FAULTY_RATE / HEALTHY_RATE)
    log_ratio += misses * math.log((1 - FAULTY_RATE) / (1 - HEALTHY_RATE))
    log_odds = DISCOUNT * log_ratio - math.log(max(columns, 1))
    return 1.0 / (1.0 + math.exp(-min(max(log_odds, -50.0), 50.0)))
