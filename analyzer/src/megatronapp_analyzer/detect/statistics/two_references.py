"""Test of columns against two references at once, in the scale of their values: logarithms, or parts of a step.

Peers do the same work, and differ by a small constant. A column's own level is learned while it is healthy, ever more
slowly, so that it does not follow a ramp; what all columns have in common in a step is taken off.

`ColumnTest` of megatronapp_native computes it; the plain form is tests/support/traces/plain_references.py.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask, filled, median_of_others_by
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.statistics.change_detection import PRIOR_CORRELATION, WINDOWS, error_of_mean
from megatronapp_native import ColumnTest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceLimits:
    """Limits of a test, in the scale of the values."""

    floor: float
    """Smallest deviation of a healthy step."""
    own: float
    """Smallest shift against the column's own level that is over."""
    peers: float
    """The same against peers."""
    cap: float
    """Shift that noise never hides; only persistence can hold it back."""
    peer_spread: float
    """Deviation of the constant differences between peers, where too few are known to measure it."""
    least_peer_spread: float
    """Least deviation of these differences where they are measured."""
    largest_step: float
    """Largest change that a level learns from."""

    @property
    def values(self) -> tuple[float, ...]:
        """Return the limits in the order in which the native test takes them."""
        peers = (self.peers, self.cap, self.peer_spread, self.least_peer_spread)
        return (self.floor, self.own, *peers, self.largest_step)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShiftReading:
    """Judgement of one step, by column."""

    known: Mask
    over: Mask
    size: Floats
    """Shift, in the scale of the values; 0 where it is unknown."""
    strength: Floats
    """Shift over its standard error, relative to the limit: above 1 is clear."""
    by_history: Mask
    """True where the column is judged by its own level, false where by peers."""

    def within(self, columns: Mask) -> "ShiftReading":
        """Return the same reading with all other columns unknown."""
        return ShiftReading(
            known=self.known & columns,
            over=self.over & columns,
            size=np.where(columns, self.size, 0.0),
            strength=np.where(columns, self.strength, 0.0),
            by_history=self.by_history,
        )


class ReplicaPart:
    """The part of a shift that the other stages of a replica have in the same step: work that varies, no slowness."""

    MEMORY, PRIOR = 0.99, 20.0

    def __init__(self) -> None:
        self._product, self._square = 0.0, 0.0

    def of(self, values: Floats, replicas: Ints, deviation: Floats) -> Floats:
        """Return the expected part of each value, from the values of its replica's other columns."""
        mates = filled(median_of_others_by(values, replicas) / deviation)
        weight = self._product / (self._square + self.PRIOR)
        out: Floats = min(max(weight, 0.0), 1.0) * mates * deviation
        return out

    def learn(self, values: Floats, replicas: Ints, deviation: Floats) -> None:
        """Learn from healthy columns how much of a value its replica explains; NaN for all other columns."""
        mates = median_of_others_by(values, replicas)
        both = np.isfinite(mates) & np.isfinite(values)
        mine, theirs = values[both] / deviation[both], mates[both] / deviation[both]
        self._product = self.MEMORY * self._product + float((mine * theirs).sum())
        self._square = self.MEMORY * self._square + float((theirs**2).sum())


class TwoReferences:
    """Levels, noise and shifts of columns; `peers` numbers those that do the same work, -1 for none."""

    def __init__(
        self, peers: Ints, settings: DetectorSettings, *, replicas: Ints | None = None, least_window: int = 1
    ) -> None:
        """`least_window`: shortest window that may be evidence, in steps."""
        self._columns = len(peers)
        self._replicas = replicas
        self._replica_part = ReplicaPart()
        self._test = ColumnTest(
            peers,
            window=settings.window,
            min_history=settings.min_history,
            least_window=least_window,
            independent_tests=settings.independent_tests,
            prior_errors=error_of_mean(np.array(WINDOWS), PRIOR_CORRELATION),
        )

    def grow(self, peers: Ints) -> None:
        """Add columns for new peers."""
        if len(peers) > self._columns:
            self._columns = len(peers)
            self._test.grow(peers)

    def read(
        self,
        values: Floats,
        limits: ReferenceLimits,
        doubt: Callable[[Floats], Floats],
        *,
        usual: Mask | None = None,
    ) -> ShiftReading:
        """Judge one step, and learn from what is healthy.

        `doubt(shift)`: what each shift may be too large by. `usual`: columns that may be learned from, if not all.
        """
        deviation, change, distance = self._test.compare(values, limits.values)
        shift, relative = self._without_replica(change, deviation), self._without_replica(distance, deviation)
        may_learn = np.ones(self._columns, np.bool_) if usual is None else usual
        found = self._test.judge(shift, relative, doubt(shift), doubt(relative), may_learn)
        known, over, size, strength, by_history, calm = found
        if self._replicas is not None:
            self._replica_part.learn(np.where(calm, change, np.nan), self._replicas, deviation)
        return ShiftReading(known=known, over=over, size=size, strength=strength, by_history=by_history)

    def _without_replica(self, values: Floats, deviation: Floats) -> Floats:
        if self._replicas is None:
            return values
        return values - self._replica_part.of(values, self._replicas, deviation)
