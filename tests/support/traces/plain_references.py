"""The plain form of the detector's test of columns against two references, in NumPy: what the native form computes.

The native form is `ColumnTest` of megatronapp_native, which `detect.statistics.two_references` calls; its results are
equal to the last bit.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from megatronapp_analyzer.detect.baseline import MAD_TO_SIGMA, ColumnHistory, Mask
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.statistics.change_detection import WINDOWS, error_of_mean
from megatronapp_analyzer.detect.statistics.two_references import ReferenceLimits, ReplicaPart, ShiftReading

CLIP = 8.0
"""Deviations to which a single value is limited, so that a disturbed step weighs no more than a few others."""
LARGEST_ERROR = 2.0
RECENT = 4
"""Newest steps that must agree with a shift for it to be there now."""
GROWN = 1.5
"""How many times larger than the shift over a longer window the newest steps must all be for it to have grown."""
OWN_PART = 0.5
"""Part of a shift that must show in the column itself, and not only in the others being smaller."""
SETTLED_STEPS = 500
"""Steps over which a level is the plain mean; from then on it forgets, at the rate of the next constant."""
SLOWEST_RATE = 1 / 2000
FEW_STEPS = 4.0
"""Steps below which a measured deviation is about as uncertain as it is large."""
LEAST_STEPS = 4
"""Steps after which the noise of a column is known well enough to compare it with peers."""
SUSPECT_STEPS = 19
"""Steps in a row that may be those of a shift before their windows are learned as noise after all."""
LEAST_KNOWN = 6
"""Columns from which on the spread between peers is measured and not assumed."""


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
    grown_size: Floats
    """Median over the newest steps where all of them are much larger, as with a second fault; the same elsewhere."""
    low_size: Floats
    """Median over the window with the smallest ratio."""
    present: Mask
    """True if the newest steps agree with the shift: it is not over."""
    means: Floats
    """[window, column] means in deviations of a step; NaN where a column has fewer values."""


class MeanErrors:
    """Standard errors of means over the windows, in deviations of a step.

    Measured in each step by the median over columns, so that a few faulty ones do not matter, and forgotten slowly.
    """

    MEMORY, PRIOR = 0.99, 20.0
    PRIOR_CORRELATION = 0.8

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

    def keep(self, columns: Mask, steps: int) -> None:
        """Forget all but the newest values of `columns`."""
        self._count = np.where(columns, np.minimum(self._count, steps), self._count)

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
        worst = np.where(filled, ratios, np.inf).argmin(axis=0)
        score = scores[best, np.arange(len(best))]
        size = self._medians(lengths[best])
        steps = np.minimum(lengths[best], RECENT)
        return Shift(
            score=np.where(np.isfinite(score), score, 0.0),
            lowest=np.where(filled, ratios, 0.0).min(axis=0),
            window=lengths[best],
            size=size,
            grown_size=self._grown(size, lengths[best], deviation),
            low_size=self._medians(lengths[worst]),
            present=self._is_recent(size, steps, deviation, errors),
            means=means,
        )

    def _medians(self, window: Ints) -> Floats:
        out = np.zeros(len(window))
        for length in np.unique(window):
            columns = np.flatnonzero(window == length)
            out[columns] = np.median(self._values[:length, columns], axis=0)
        return out

    def _grown(self, size: Floats, window: Ints, deviation: Floats) -> Floats:
        newest = self._values[:RECENT]
        grown = (newest > GROWN * size + 2.0 * deviation).all(axis=0) & (window > RECENT)
        return np.where(grown, np.median(newest, axis=0), size)

    def _is_recent(self, size: Floats, steps: Ints, deviation: Floats, errors: MeanErrors) -> Mask:
        """Return columns whose newest steps, 1, 2 and more of them, are not clearly below half of the shift."""
        mean = np.cumsum(self._values[:RECENT], axis=0)[steps - 1, np.arange(len(size))] / steps
        present: Mask = (mean > 0.5 * size - 2.0 * deviation * errors.over(steps)) & (mean > 0)
        present &= self._values[0] > 0.5 * size - 2.0 * deviation
        present &= (steps < 2) | (self._values[:2].mean(axis=0) > 0.5 * size - 1.4 * deviation)
        return present


class PlainReferences:
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
        self._offset = np.full(columns, np.nan)
        self._before = np.full(columns, np.nan)
        self._last_size = np.full(columns, np.nan)
        """Size of the last clear shift, until it is forgotten."""
        self._last_by_history = np.zeros(columns, np.bool_)
        self._ended = np.zeros(columns, np.int64)
        """Steps in a row that show no sign of it."""
        self._calm = np.zeros(columns, np.int64)
        """Steps since the last that was part of a shift."""
        self._suspect = np.zeros(columns, np.int64)
        """Steps in a row, up to now, that may be part of a shift."""
        self._residuals = ColumnHistory(columns, settings.window)
        self._shifts = RecentValues(columns)
        self._distances = RecentValues(columns)
        self._errors = MeanErrors()
        self._replica_part = ReplicaPart()

    @property
    def _limit(self) -> float:
        return math.sqrt(2.0 * math.log(self._settings.independent_tests * max(len(self._peers), 2)))

    def grow(self, peers: Ints) -> None:
        """Add columns for new peers."""
        missing = len(peers) - len(self._peers)
        if missing <= 0:
            return
        self._peers = peers
        self._level = np.pad(self._level, (0, missing), constant_values=np.nan)
        self._before = np.pad(self._before, (0, missing), constant_values=np.nan)
        self._learned = np.pad(self._learned, (0, missing))
        self._last_size = np.pad(self._last_size, (0, missing), constant_values=np.nan)
        self._last_by_history = np.pad(self._last_by_history, (0, missing))
        self._ended = np.pad(self._ended, (0, missing))
        self._calm = np.pad(self._calm, (0, missing))
        self._suspect = np.pad(self._suspect, (0, missing))
        self._offset = np.pad(self._offset, (0, missing), constant_values=np.nan)
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
        change = own - np.nan_to_num(plain_median_of_others(own))
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
        suspect = (score >= self._limit / 2) | (low <= -self._limit / 2)
        learns = calm & ~suspect & np.isfinite(values)
        if learns.sum() == 1 and np.isfinite(own).sum() > 1:  # without others, what all have in common is not known
            learns[:] = False
        self._learn_level(own, distance, learns, limits)
        self._learn_noise(shift)
        calm &= warm & (score < self._limit) & (low > -self._limit)
        below = np.where((low < -self._limit) & (changed.low_size < -limits.own), changed.low_size, np.nan)
        self._follow_shifts(reading, shift, relative, below, deviation)
        self._suspect = np.where(suspect, self._suspect + 1, 0)
        noise = calm & (~suspect | (self._suspect > SUSPECT_STEPS)) & (np.array(WINDOWS)[:, None] <= self._calm)
        self._errors.add(np.where(noise, changed.means, np.nan))
        if self._replicas is not None:
            self._replica_part.learn(np.where(calm, change, np.nan), self._replicas, deviation)
        return reading

    def _follow_shifts(
        self, reading: ShiftReading, shift: Floats, relative: Floats, below: Floats, deviation: Floats
    ) -> None:
        """Forget shifts of which the newest steps show no sign.

        The windows that contain one would stay above the limit: a smaller shift would not be seen, and in a job of two
        columns what they contain would at last be learned as noise. Of two columns each is compared with the other, so
        that the shift of one is that of the other, downwards: by `below`, NaN for others.
        """
        margin = 2.0 * deviation
        with np.errstate(invalid="ignore"):
            continues_below = ~reading.over & (shift < 0.5 * below + margin)
        part = reading.over | continues_below
        self._last_size = np.where(reading.over, reading.size, np.where(continues_below, below, self._last_size))
        self._last_by_history = np.where(part, continues_below | reading.by_history, self._last_by_history)
        self._calm = np.where(part, 0, self._calm + np.isfinite(shift))
        value = np.where(self._last_by_history, shift, relative)
        half = 0.5 * self._last_size
        with np.errstate(invalid="ignore"):
            is_over = np.where(self._last_size > 0, value < half - margin, value > half + margin)
        known = np.isfinite(self._last_size) & np.isfinite(value)
        ended = np.where(known, np.where(is_over, self._ended + 1, 0), self._ended)
        self._ended = np.where(part, 0, ended)
        forgotten = ~part & known & (self._ended == RECENT) & (self._least_window <= 1)
        self._shifts.keep(forgotten, RECENT)
        self._distances.keep(forgotten, RECENT)
        self._last_size = np.where(forgotten, np.nan, self._last_size)
        self._last_by_history &= ~forgotten
        self._ended = np.where(forgotten, 0, self._ended)

    def _distance(self, values: Floats) -> Floats:
        out: Floats = np.where(self._peers >= 0, values - plain_median_of_others_by(values, self._peers), np.nan)
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
            size=np.where(known, np.where(clear, found.grown_size, newest), 0.0),
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
        change = np.clip(own - np.nan_to_num(plain_median_of_others(others)), -limits.largest_step, limits.largest_step)
        with np.errstate(invalid="ignore"):
            self._level = np.where(healthy, self._level + rate * np.nan_to_num(change), self._level)
            before = np.where(np.isnan(self._offset), distance, self._offset)
            learns = healthy & np.isfinite(distance)
            self._offset = np.where(learns, before + rate * (distance - before), self._offset)

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


def plain_median_of_others(values: Floats) -> Floats:
    """Return for each finite value the lower median of the other finite ones; NaN without any other. O(n log n)."""
    out = np.full(len(values), np.nan)
    finite = np.flatnonzero(np.isfinite(values))
    others = len(finite) - 1
    if others < 1:
        return out
    order = finite[np.argsort(values[finite], kind="stable")]
    middle = (others - 1) // 2
    ordered = values[order]
    out[order] = np.where(np.arange(len(order)) <= middle, ordered[middle + 1], ordered[middle])
    return out


def plain_median_of_others_by(values: Floats, group: Ints) -> Floats:
    """As `plain_median_of_others`, within each group."""
    out = np.full(len(values), np.nan)
    for number in np.unique(group):
        inside = np.flatnonzero(group == number)
        out[inside] = plain_median_of_others(values[inside])
    return out
