"""Test of columns against two references at once, in the scale of their values: logarithms, or parts of a step.

Peers do the same work, and differ by a small constant. A column's own level is learned while it is healthy, ever more
slowly, so that it does not follow a ramp; what all columns have in common in a step is taken off.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from megatronapp_analyzer.detect.baseline import (
    MAD_TO_SIGMA,
    ColumnHistory,
    Mask,
    median_of_others,
    median_of_others_by,
)
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.statistics.change_detection import MeanErrors, RecentValues, Shift

OWN_PART = 0.5
"""Part of a shift that must show in the column itself, and not only in the others being smaller."""
SETTLED_STEPS = 500
"""Steps over which a level is the plain mean; from then on it forgets, at the rate of the next constant."""
SLOWEST_RATE = 1 / 2000
FEW_STEPS = 4.0
"""Steps below which a measured deviation is about as uncertain as it is large."""
LEAST_STEPS = 4
"""Steps after which the noise of a column is known well enough to compare it with peers."""
LEAST_KNOWN = 6
"""Columns from which on the spread between peers is measured and not assumed."""


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
        mates = np.nan_to_num(median_of_others_by(values, replicas) / deviation)
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
        columns = len(peers)
        self._peers = peers
        self._replicas = replicas
        self._settings = settings
        self._least_window = least_window
        self._level = np.full(columns, np.nan)
        self._learned = np.zeros(columns, np.int64)
        self._offset = np.zeros(columns)
        self._before = np.full(columns, np.nan)
        self._residuals = ColumnHistory(columns, settings.window)
        self._shifts = RecentValues(columns)
        self._distances = RecentValues(columns)
        self._errors = MeanErrors()
        self._replica_part = ReplicaPart()

    @property
    def _limit(self) -> float:
        return self._settings.score + math.sqrt(2.0 * math.log(max(len(self._peers), 2)))

    def grow(self, peers: Ints) -> None:
        """Add columns for new peers."""
        missing = len(peers) - len(self._peers)
        if missing <= 0:
            return
        self._peers = peers
        self._level = np.pad(self._level, (0, missing), constant_values=np.nan)
        self._before = np.pad(self._before, (0, missing), constant_values=np.nan)
        self._learned = np.pad(self._learned, (0, missing))
        self._offset = np.pad(self._offset, (0, missing))
        self._residuals.grow(len(peers))
        self._shifts.grow(len(peers))
        self._distances.grow(len(peers))

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
        self._level = np.where(np.isnan(self._level), values, self._level)
        deviation = self._deviation(limits)
        own = values - self._level
        change = own - np.nan_to_num(median_of_others(own))
        distance = self._distance(values)
        shift, relative = self._without_replica(change, deviation), self._without_replica(distance, deviation)
        warm = self._learned >= self._settings.min_history
        doubts = doubt(shift), doubt(relative)
        self._shifts.add(np.where(warm, shift - doubts[0], np.nan))
        self._distances.add(relative - doubts[1])
        level_error = deviation * self._errors.over(self._learned)
        changed = self._shifts.test(deviation, self._errors, level_error)
        distant = self._distances.test(deviation, self._errors, self._peer_spread(limits))
        history = self._reading(changed, shift, limits.own, limits.cap, doubts[0])
        history = history.within(warm & (own > OWN_PART * history.size - 2.0 * deviation))
        compared = self._reading(distant, relative, limits.peers, limits.cap, doubts[1])
        compared = compared.within((relative > limits.cap) | (self._residuals.count >= LEAST_STEPS))
        reading = _stronger(history, compared, warm)
        calm = ~reading.over & (True if usual is None else usual)
        score = np.maximum(np.where(warm, changed.score, 0.0), distant.score)
        low = np.where(warm, changed.lowest, 0.0)
        learns = calm & (score < self._limit / 2) & (low > -self._limit / 2) & np.isfinite(values)
        self._learn_level(own, distance, learns, limits)
        self._learn_noise(shift)
        calm &= warm & (score < self._limit) & (low > -self._limit)
        self._errors.add(np.where(calm, changed.means, np.nan))
        if self._replicas is not None:
            self._replica_part.learn(np.where(calm, change, np.nan), self._replicas, deviation)
        return reading

    def _distance(self, values: Floats) -> Floats:
        out: Floats = np.where(self._peers >= 0, values - median_of_others_by(values, self._peers), np.nan)
        return out

    def _without_replica(self, values: Floats, deviation: Floats) -> Floats:
        if self._replicas is None:
            return values
        return values - self._replica_part.of(values, self._replicas, deviation)

    def _reading(self, found: Shift, newest: Floats, least: float, cap: float, doubt: Floats) -> ShiftReading:
        """Return what the test against one reference says."""
        known = np.isfinite(newest)
        clear = (found.score > self._limit) & (found.size > least) & found.present
        extreme = newest > np.maximum(max(cap, least), least + doubt)
        if self._least_window > 1:
            clear, extreme = clear & (found.window >= self._least_window), np.zeros_like(extreme)
        return ShiftReading(
            known=known,
            over=known & (clear | extreme),
            size=np.where(known, np.where(clear, found.size, newest), 0.0),
            strength=np.where(known, found.score / self._limit, 0.0),
            by_history=np.zeros(len(known), np.bool_),
        )

    def _deviation(self, limits: ReferenceLimits) -> Floats:
        """Return the deviation of a step's residual, of each column at least that of the usual one."""
        count = self._residuals.count
        scale = np.fmax(self._residuals.deviation() * (1.0 + FEW_STEPS / np.maximum(count, 1)), limits.floor)
        pooled = np.nanmedian(scale) if np.isfinite(scale).any() else limits.floor
        out: Floats = np.maximum(np.nan_to_num(scale, nan=pooled), pooled)
        return out

    def _peer_spread(self, limits: ReferenceLimits) -> Floats:
        """Return the deviation of the constant differences between peers: measured where enough of them are known."""
        known = np.isfinite(self._offset) & (self._learned >= self._settings.min_history)
        spread = limits.peer_spread
        if known.sum() >= LEAST_KNOWN:
            spread = max(MAD_TO_SIGMA * float(np.median(np.abs(self._offset[known]))), limits.least_peer_spread)
        return np.full(len(known), spread)

    def _learn_level(self, own: Floats, distance: Floats, healthy: Mask, limits: ReferenceLimits) -> None:
        """Move levels of healthy columns by their change relative to each other; learn distances from peers."""
        self._learned += healthy
        rate = np.where(self._learned < SETTLED_STEPS, 1.0 / np.maximum(self._learned, 1), SLOWEST_RATE)
        others = np.where(healthy, own, np.nan)
        change = np.clip(own - np.nan_to_num(median_of_others(others)), -limits.largest_step, limits.largest_step)
        with np.errstate(invalid="ignore"):
            self._level = np.where(healthy, self._level + rate * np.nan_to_num(change), self._level)
            self._offset = np.where(healthy, self._offset + rate * (distance - self._offset), self._offset)

    def _learn_noise(self, shift: Floats) -> None:
        """Learn how much shifts differ from step to step: a lasting one does not look like noise then."""
        difference = (shift - self._before) / math.sqrt(2.0)
        self._residuals.add(difference, np.isfinite(difference))
        self._before = np.where(np.isfinite(shift), shift, self._before)


def _stronger(history: ShiftReading, peers: ShiftReading, warm: Mask) -> ShiftReading:
    """Return for each column the reading that is over with the larger shift; without any, the one by history."""
    by_peers = peers.over & (~history.over | (peers.size > history.size))
    chosen = history.known & ~by_peers
    return ShiftReading(
        known=history.known | peers.known,
        over=np.where(chosen, history.over, peers.over),
        size=np.where(chosen, history.size, peers.size),
        strength=np.where(chosen, history.strength, peers.strength),
        by_history=warm & chosen,
    )
