"""Simple detectors, written from the published descriptions of others. Each names ranks only.

None reproduces a product: they are the core rules, on the spans that this benchmark has.
"""

import collections
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from detect.layout import Grid
from detect.protocol import NamedSubject, StepTrace, Verdict
from detect.summaries import Floats, Summary, group_medians, summarise
from megatronapp_common.trace import RecordKind

Mask = NDArray[np.bool_]


def _named(ranks: Iterable[int], cause: str = "compute") -> list[Verdict]:
    return [Verdict(subject=NamedSubject((int(rank),)), cause=cause) for rank in ranks]


def _stages(grid: Grid) -> NDArray[np.int64]:
    return np.arange(grid.world) // grid.stage_size


class MegatronAppRule:
    """MegaScan's rule as MegatronApp publishes it: data-parallel peers, more than 5 times; it names a single rank.

    A rank is suspect in a step if its all-reduce is the shortest of its group and below 0.9 of the mean of the others,
    or its backward passes are the longest and above 1.1 of the mean of the others. Times are counted over the last
    steps, as that tool reads a trace of some steps. Its second test, on tensor-parallel reductions, needs spans that
    are not recorded here; with tensor parallelism the suspect of the first test is named.
    """

    WINDOW, LEAST, MOST, TIMES = 20, 0.9, 1.1, 5

    def __init__(self, grid: Grid) -> None:
        ranks = np.arange(grid.world)
        self._groups = (ranks // grid.stage_size) * grid.tp + ranks % grid.tp
        self._recent: collections.deque[NDArray[np.int64]] = collections.deque(maxlen=self.WINDOW)

    def step(self, trace: StepTrace) -> Sequence[Verdict]:
        """Count suspicions; the rank with most of them is named if they exceed the limit."""
        if trace.step == 0:
            return []
        self._recent.append(np.zeros(trace.grid.world, np.int64))
        summary = summarise(trace)
        reduce_s, backward_s = summary.of(RecordKind.GRAD_REDUCE), summary.of(RecordKind.BACKWARD)
        for group in np.unique(self._groups):
            inside = np.flatnonzero(self._groups == group)
            if len(inside) > 1:
                self._judge(inside, -reduce_s[inside], -self.LEAST)
                self._judge(inside, backward_s[inside], self.MOST)
        times = np.sum(np.stack(self._recent), axis=0)
        return _named([int(times.argmax())] if times.max() > self.TIMES else [])

    def _judge(self, inside: NDArray[np.int64], values: Floats, limit: float) -> None:
        if not np.isfinite(values).all():
            return
        first = int(values.argmax())
        if values[first] > limit * abs(np.delete(values, first).mean()):
            self._recent[-1][inside[first]] = 1


class RelativeScore:
    """Score of NVIDIA's resiliency extension: reference over own median, weighted by time; named below 0.75.

    The reference is the fastest rank of the same stage, or the rank's own best window.
    """

    WINDOW, LIMIT = 20, 0.75
    SECTIONS = (RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.OPTIMIZER, RecordKind.DATA)

    def __init__(self, grid: Grid) -> None:
        self._stages = _stages(grid)
        self._recent: collections.deque[Floats] = collections.deque(maxlen=self.WINDOW)
        self._best: Floats | None = None

    def step(self, trace: StepTrace) -> Sequence[Verdict]:
        """Score the medians of the last steps."""
        summary = summarise(trace)
        self._recent.append(np.stack([summary.of(kind) for kind in self.SECTIONS]))
        if len(self._recent) < self.WINDOW:
            return []
        with np.errstate(all="ignore"):
            own = _nanmedian(np.stack(self._recent))
            self._best = own if self._best is None else np.fmin(self._best, own)
            fastest = np.full_like(own, np.nan)
            for stage in np.unique(self._stages):
                inside = self._stages == stage
                fastest[:, inside] = np.nan_to_num(own[:, inside], nan=np.inf).min(axis=1, keepdims=True)
            weight = np.nan_to_num(own)
            scores = [
                (np.nan_to_num(reference / own, nan=1.0) * weight).sum(axis=0) / weight.sum(axis=0)
                for reference in (fastest, self._best)
            ]
        return _named(np.flatnonzero(np.fmin(*scores) < self.LIMIT))


class LateStart:
    """Holistic Trace Analysis: the rank that most often starts the last long collective last."""

    WINDOW, FREQUENCY, LEAST_WAIT = 20, 0.6, 0.02

    def __init__(self, grid: Grid) -> None:
        ranks = np.arange(grid.world)
        self._kind = RecordKind.GRAD_REDUCE if grid.dp > 1 else RecordKind.GRAD_NORM
        self._groups = (ranks // grid.stage_size) * grid.tp + ranks % grid.tp if grid.dp > 1 else 0 * ranks
        self._recent: collections.deque[int] = collections.deque(maxlen=self.WINDOW)

    def step(self, trace: StepTrace) -> Sequence[Verdict]:
        """Name the rank that was clearly last in most of the last steps."""
        summary = summarise(trace)
        start = summary.start_s[int(self._kind)]
        wait = start - group_medians(start, self._groups)
        late = np.isfinite(wait).any() and np.nanmax(wait) > self.LEAST_WAIT * summary.step_s
        self._recent.append(int(np.nanargmax(wait)) if late else -1)
        rank, times = collections.Counter(self._recent).most_common(1)[0]
        return _named([rank] if rank >= 0 and times >= self.FREQUENCY * self.WINDOW else [])


class ChangePoint:
    """Greyhound's order of tests: a change of the step time, verified; then ranks beyond the median of their stage.

    Changes are found by Bayesian online detection (run lengths, Student-t predictive); a change counts if the means of
    10 steps before and after differ by 10 %. Ranks are compared at 10 % above the median, as its groups are.
    """

    HAZARD, VERIFY, STEPS, LIMIT = 1 / 250, 1.10, 10, 1.10

    def __init__(self, grid: Grid) -> None:
        self._stages = _stages(grid)
        self._lengths: list[float] = []
        self._usual: float | None = None
        self._runs = _RunLengths(self.HAZARD)
        self._computes: collections.deque[Floats] = collections.deque(maxlen=self.STEPS)
        self._named: list[int] = []

    def step(self, trace: StepTrace) -> Sequence[Verdict]:
        """Judge the step time, and after a verified change the ranks."""
        summary = summarise(trace)
        if trace.step == 0 or not math.isfinite(summary.step_s):
            return _named(self._named)
        self._lengths.append(summary.step_s)
        self._computes.append(summary.compute_s)
        changed = self._runs.add(math.log(summary.step_s))
        if len(self._lengths) >= 2 * self.STEPS:
            recent = float(np.mean(self._lengths[-self.STEPS :]))
            self._usual = self._usual or float(np.mean(self._lengths[: self.STEPS]))
            if changed or self._named:
                self._named = self._slow() if recent > self.VERIFY * self._usual else []
            if not self._named and recent < self.VERIFY * self._usual:
                self._usual = 0.9 * self._usual + 0.1 * recent
        return _named(self._named)

    def _slow(self) -> list[int]:
        with np.errstate(all="ignore"):
            compute = _nanmedian(np.stack(self._computes))
            return [int(rank) for rank in np.flatnonzero(compute > self.LIMIT * group_medians(compute, self._stages))]


class _RunLengths:
    """Bayesian online change-point detection with a Normal-inverse-gamma model; the oldest runs are dropped."""

    LONGEST, SHORT, LIKELY = 300, 10, 0.5

    def __init__(self, hazard: float) -> None:
        self._hazard = hazard
        self._weight = np.ones(1)
        self._mean, self._count = np.zeros(1), np.full(1, 1e-2)
        self._shape, self._scale = np.ones(1), np.full(1, 1e-4)
        self._seen = 0

    def add(self, value: float) -> bool:
        """Take a value; return true while the newest run has probably begun within the last steps."""
        if self._seen == 0:
            self._mean[:] = value
        self._seen += 1
        spread = self._scale * (self._count + 1) / (self._count * self._shape)
        density = _student(value - self._mean, spread, 2 * self._shape)
        grown = self._weight * density * (1 - self._hazard)
        fresh = (self._weight * density * self._hazard).sum()
        weight = np.append(fresh, grown)
        self._weight = weight / weight.sum()
        mean = (self._count * self._mean + value) / (self._count + 1)
        scale = self._scale + self._count * (value - self._mean) ** 2 / (2 * (self._count + 1))
        self._mean, self._count = np.append(value, mean), np.append(1e-2, self._count + 1)
        self._shape, self._scale = np.append(1.0, self._shape + 0.5), np.append(1e-4, scale)
        for name in ("_weight", "_mean", "_count", "_shape", "_scale"):
            setattr(self, name, getattr(self, name)[: self.LONGEST])
        return self._seen > 2 * self.SHORT and float(self._weight[: self.SHORT].sum()) > self.LIKELY


class MedianDeviation:
    """Plain distance from peers: z > 3 and 3 % in at least half of the last steps, by median and MAD of the stage."""

    WINDOW, Z, LEAST = 20, 3.0, 1.03

    def __init__(self, grid: Grid) -> None:
        self._stages = _stages(grid)
        self._recent: collections.deque[Mask] = collections.deque(maxlen=self.WINDOW)

    def step(self, trace: StepTrace) -> Sequence[Verdict]:
        """Judge one step, and name by the share of the last ones."""
        if trace.step == 0:
            return []
        self._recent.append(self._far(summarise(trace)))
        frequency = np.mean(np.stack(self._recent), axis=0)
        return _named(np.flatnonzero(frequency >= 0.5)) if len(self._recent) == self.WINDOW else []

    def _far(self, summary: Summary) -> Mask:
        with np.errstate(all="ignore"):
            logs = np.log(summary.compute_s)
            middle = group_medians(logs, self._stages)
            spread = 1.4826 * group_medians(np.abs(logs - middle), self._stages)
            far: Mask = logs - middle > np.maximum(self.Z * np.maximum(spread, 0.005), math.log(self.LEAST))
        return far


def _student(error: Floats, spread: Floats, freedom: Floats) -> Floats:
    log_norm = np.array([math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) for nu in freedom.tolist()])
    log_norm -= 0.5 * np.log(np.pi * freedom * spread)
    out: Floats = np.exp(log_norm - (freedom + 1) / 2 * np.log1p(error**2 / (freedom * spread)))
    return out


def _nanmedian(values: Floats) -> Floats:
    """Return the median over the first axis; NaN where all are."""
    known = np.isfinite(values).any(axis=0)
    out = np.full(values.shape[1:], np.nan)
    if known.any():
        out[known] = np.nanmedian(values[:, known], axis=0)
    return out
