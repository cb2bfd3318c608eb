"""Channel of compute time: units that have become slow, or have been slow from the start, in logarithms of seconds."""

import dataclasses
import math

import numpy as np

from megatronapp_analyzer.detect.baseline import (
    MAD_TO_SIGMA,
    ColumnHistory,
    Mask,
    median_of_others,
    median_of_others_by,
)
from megatronapp_analyzer.detect.change_detection import MeanErrors, RecentValues, Shift
from megatronapp_analyzer.detect.evidence_channels import SIGMA_CAP, ChannelReading
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings, NoiseLevel

OWN_PART = 0.5
"""Part of a shift that must show in the column itself, and not only in the others being faster."""
SETTLED_STEPS = 500
"""Steps over which a level is the plain mean; from then on it forgets, at the rate of the next constant."""
SLOWEST_RATE = 1 / 2000
LARGEST_STEP = 1.0
"""Largest change, in logarithms, that a level learns from."""
FEW_STEPS = 4.0
"""Steps below which a measured deviation is about as uncertain as it is large."""
LEAST_STEPS = 4
"""Steps after which the noise of a column is known well enough to compare it with peers."""
LEAST_KNOWN = 6
"""Columns from which on the spread between peers is measured and not assumed."""


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


class LogChannel:
    """Compute time of units against two references at once.

    Peers do the same work, and differ by a small constant. A unit's own level is learned while it is healthy, ever more
    slowly, so that it does not follow a ramp; what all units have in common in a step is taken off.
    """

    def __init__(self, peers: Ints, replicas: Ints, settings: DetectorSettings, *, cap: float = SIGMA_CAP) -> None:
        columns = len(peers)
        self._peers = peers
        self._replicas = replicas
        self._settings = settings
        self._cap = cap
        self._limit = settings.score + math.sqrt(2.0 * math.log(max(columns, 2)))
        self._level = np.full(columns, np.nan)
        self._learned = np.zeros(columns, np.int64)
        self._offset = np.zeros(columns)
        self._before = np.full(columns, np.nan)
        self._residuals = ColumnHistory(columns, settings.window)
        self._shifts = RecentValues(columns)
        self._distances = RecentValues(columns)
        self._errors = MeanErrors()
        self._replica_part = ReplicaPart()

    def read(
        self, values_s: Floats, noise: NoiseLevel, doubt_s: Floats, *, usual: Mask | None = None
    ) -> ChannelReading:
        """Judge one step, and learn from what is healthy.

        `doubt_s`: what each value may be too large by. `usual`: columns that may be learned from, if not all.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(values_s)
        self._level = np.where(np.isnan(self._level), logs, self._level)
        deviation = self._deviation(noise)
        own = logs - self._level
        change = own - np.nan_to_num(median_of_others(own))
        distance = logs - median_of_others_by(logs, self._peers)
        shift = change - self._replica_part.of(change, self._replicas, deviation)
        relative = distance - self._replica_part.of(distance, self._replicas, deviation)
        warm = self._learned >= self._settings.min_history
        doubts = [_doubt(doubt_s, values_s, values) for values in (shift, relative)]
        self._shifts.add(np.where(warm, shift - doubts[0], np.nan))
        self._distances.add(relative - doubts[1])
        level_error = deviation * self._errors.over(self._learned)
        changed = self._shifts.test(deviation, self._errors, level_error)
        distant = self._distances.test(deviation, self._errors, self._peer_spread(noise))
        history = self._reading(changed, shift, values_s, noise.compute_ratio, doubt=doubts[0])
        history = history.within(warm & (own > OWN_PART * np.log(history.ratio) - 2.0 * deviation))
        extreme = relative > math.log(self._cap)
        compared = self._reading(distant, relative, values_s, noise.peer_ratio, doubt=doubts[1])
        compared = compared.within(extreme | (self._residuals.count >= LEAST_STEPS))
        reading = _stronger(history, compared, warm)
        calm = ~reading.over & (True if usual is None else usual)
        score = np.maximum(np.where(warm, changed.score, 0.0), distant.score)
        low = np.where(warm, changed.lowest, 0.0)
        learns = calm & (score < self._limit / 2) & (low > -self._limit / 2) & np.isfinite(logs)
        self._learn_level(own, distance, learns)
        self._learn_noise(shift)
        calm &= warm & (score < self._limit) & (low > -self._limit)
        self._errors.add(np.where(calm, changed.means, np.nan))
        self._replica_part.learn(np.where(calm, change, np.nan), self._replicas, deviation)
        return reading

    def _reading(
        self, found: Shift, newest: Floats, values_s: Floats, least_ratio: float, *, doubt: Floats
    ) -> ChannelReading:
        """Return what the test against one reference says."""
        known = np.isfinite(newest)
        clear = (found.score > self._limit) & (found.size > math.log(least_ratio)) & found.present
        extreme = newest > np.maximum(math.log(max(self._cap, least_ratio)), math.log(least_ratio) + doubt)
        size = np.where(known, np.where(clear, found.size, newest), 0.0)
        return ChannelReading(
            known=known,
            over=known & (clear | extreme),
            excess=np.nan_to_num(values_s) * (1.0 - np.exp(-size)),
            ratio=np.exp(size),
            strength=np.where(known, found.score / self._limit, 0.0),
            by_history=np.zeros(len(known), np.bool_),
        )

    def _deviation(self, noise: NoiseLevel) -> Floats:
        """Return the deviation of a step's residual, of each column at least that of the usual one."""
        count = self._residuals.count
        scale = np.fmax(self._residuals.deviation() * (1.0 + FEW_STEPS / np.maximum(count, 1)), noise.compute_floor)
        pooled = np.nanmedian(scale) if np.isfinite(scale).any() else noise.compute_floor
        out: Floats = np.maximum(np.nan_to_num(scale, nan=pooled), pooled)
        return out

    def _peer_spread(self, noise: NoiseLevel) -> Floats:
        """Return the deviation of the constant differences between peers: measured where enough of them are known."""
        known = np.isfinite(self._offset) & (self._learned >= self._settings.min_history)
        spread = noise.peer_spread
        if known.sum() >= LEAST_KNOWN:
            spread = max(MAD_TO_SIGMA * float(np.median(np.abs(self._offset[known]))), noise.least_peer_spread)
        return np.full(len(known), spread)

    def _learn_level(self, own: Floats, distance: Floats, healthy: Mask) -> None:
        """Move levels of healthy columns by their change relative to each other; learn distances from peers."""
        self._learned += healthy
        rate = np.where(self._learned < SETTLED_STEPS, 1.0 / np.maximum(self._learned, 1), SLOWEST_RATE)
        others = np.where(healthy, own, np.nan)
        change = np.clip(own - np.nan_to_num(median_of_others(others)), -LARGEST_STEP, LARGEST_STEP)
        with np.errstate(invalid="ignore"):
            self._level = np.where(healthy, self._level + rate * np.nan_to_num(change), self._level)
            self._offset = np.where(healthy, self._offset + rate * (distance - self._offset), self._offset)

    def _learn_noise(self, shift: Floats) -> None:
        """Learn how much shifts differ from step to step: a lasting one does not look like noise then."""
        difference = (shift - self._before) / math.sqrt(2.0)
        self._residuals.add(difference, np.isfinite(difference))
        self._before = np.where(np.isfinite(shift), shift, self._before)


def _doubt(doubt_s: Floats, values_s: Floats, shift: Floats) -> Floats:
    """Return by how much a shift may be too large, in logarithms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        out: Floats = np.log1p(np.nan_to_num(doubt_s / (values_s * np.exp(-shift))))
    return out


def _stronger(history: ChannelReading, peers: ChannelReading, warm: Mask) -> ChannelReading:
    """Return for each column the reading that is over with the larger shift; without any, the one by history."""
    by_peers = peers.over & (~history.over | (peers.ratio > history.ratio))
    chosen = history.known & ~by_peers
    reading = history.within(chosen).or_else(peers)
    return dataclasses.replace(reading, by_history=warm & ~by_peers & history.known)
