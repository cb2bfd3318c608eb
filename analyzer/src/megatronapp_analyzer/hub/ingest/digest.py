"""One step boiled down to four numbers per rank, for the heat map, the live page and Prometheus. Pure NumPy.

compute   seconds in FORWARD, BACKWARD, WEIGHT and OPTIMIZER spans, less the wait for a processor
wait      seconds in waits for peers: SEND_WAIT, RECV_WAIT and collectives
step      seconds of the STEP span
slowdown  passes (forward, backward, weight gradients) against the median of the other ranks of the same stage; where
          there are none, and for the faster one of two, against the median of the rank's own last HISTORY_STEPS steps
"""

import dataclasses
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.records import GROUP_KINDS
from megatronapp_analyzer.model import JobLayout, RankRecords
from megatronapp_common.trace import COMPUTE_KINDS, DURATION_UNIT_NS, PASS_KINDS, Flag, RecordKind
from megatronapp_native import sum_spans

METRICS = ("compute", "wait", "step", "slowdown")
HISTORY_STEPS = 64
MIN_HISTORY = 4
WAIT_KINDS = frozenset({RecordKind.SEND_WAIT, RecordKind.RECV_WAIT}) | GROUP_KINDS
SUMMED_KINDS = (COMPUTE_KINDS, WAIT_KINDS, frozenset({RecordKind.STEP}), PASS_KINDS)
"""Kinds of spans that each column of a native sum adds up."""
BUSY_COLUMNS = 0b1001
"""Columns without the wait for a processor: compute and passes."""
COLUMNS_OF_KIND = bytes(
    sum((kind in kinds) << column for column, kinds in enumerate(SUMMED_KINDS)) for kind in range(256)
)
PAIR = 2
Floats = NDArray[np.float64]


def durations_ns(records: RankRecords) -> NDArray[np.int64]:
    """Return the length of every span in nanoseconds."""
    return records["duration"].astype(np.int64) * DURATION_UNIT_NS


def run_queue_ns(records: RankRecords) -> NDArray[np.int64]:
    """Return the wait for a processor within every span in nanoseconds; 0 where unknown."""
    known = (records["flags"] & Flag.AUX_RUN_QUEUE) != 0
    return np.where(known, records["aux"].astype(np.int64) * DURATION_UNIT_NS, 0)


def is_kind(records: RankRecords, kinds: frozenset[RecordKind] | tuple[RecordKind, ...]) -> NDArray[np.bool_]:
    """Return which rows are of one of `kinds`."""
    table = np.zeros(256, np.bool_)
    table[[int(kind) for kind in kinds]] = True
    mask: NDArray[np.bool_] = table[records["kind"]]
    return mask


def stage_groups(layout: JobLayout) -> list[NDArray[np.int64]]:
    """Return the ranks of each pipeline stage: they do the same work."""
    stages: dict[int, list[int]] = {}
    for rank, stage in enumerate(layout.stages):
        stages.setdefault(stage, []).append(rank)
    return [np.array(ranks) for _, ranks in sorted(stages.items())]


def against_others(values: Floats) -> Floats:
    """Divide each value by the median of the others; NaN without others. O(n log n)."""
    others = len(values) - 1
    if others < 1:
        return np.full(len(values), np.nan)
    order = np.argsort(values)
    ordered, place = values[order], np.arange(len(values))
    # Without itself, what follows a value in order moves down by one place.
    lower, upper = ((middle + (place <= middle)) for middle in ((others - 1) // 2, others // 2))
    median = np.empty(len(values))
    median[order] = (ordered[lower] + ordered[upper]) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Floats = values / median
    return ratio


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepDigest:
    """Digest of one step. `values` is float32 [metric][rank], NaN where the rank has not reported."""

    attempt: int
    step: int
    start_real_ns: int
    duration_ns: int
    complete: bool
    values: NDArray[np.float32]


class StepDigester:
    """Maker of the digests of one attempt, in order; remembers HISTORY_STEPS of each rank's pass times."""

    def __init__(self, world: int, layout: JobLayout | None) -> None:
        self._world = world
        self._groups = stage_groups(layout) if layout else []
        self._history: deque[Floats] = deque(maxlen=HISTORY_STEPS)

    def values(self, records: RankRecords) -> NDArray[np.float32]:
        """Return the [metric][rank] table of one step."""
        sums = np.empty((len(SUMMED_KINDS), self._world))
        rows = np.ascontiguousarray(records).view(np.uint8)
        sum_spans(rows, COLUMNS_OF_KIND, BUSY_COLUMNS, Flag.AUX_RUN_QUEUE, sums)
        out = np.full((len(METRICS), self._world), np.nan, np.float32)
        out[:3] = sums[:3]
        out[3] = self._slowdown(sums[3])
        out[:, out[2] == 0] = np.nan
        return out

    def _slowdown(self, passes: Floats) -> Floats:
        ratio = np.full(self._world, np.nan)
        for group in self._groups:
            ratio[group] = against_others(passes[group])
            if len(group) == PAIR:
                # Next to a slow peer a healthy rank would seem fast: which one differs only its own history shows.
                ratio[group[ratio[group] < 1]] = np.nan
        alone = np.isnan(ratio)
        if alone.any() and len(self._history) >= MIN_HISTORY:
            usual = np.median(np.array(self._history), axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio[alone] = (passes / usual)[alone]
        self._history.append(passes)
        ratio[~np.isfinite(ratio)] = np.nan
        return ratio


def phase_seconds(records: RankRecords, workers: Mapping[int, int]) -> dict[tuple[int, int], tuple[float, int]]:
    """Return seconds and number of the spans of each (worker, kind)."""
    worker_of = np.array([workers.get(rank, -1) for rank in range(int(records["rank"].max(initial=-1)) + 1)], np.int64)
    # Spans of workers that are not known are counted as those of worker -1, in the first 256 places.
    keys = (worker_of[records["rank"]] + 1) * 256 + records["kind"]
    counts = np.bincount(keys)
    sums = np.bincount(keys, weights=durations_ns(records) * 1e-9)
    return {
        (int(key) // 256 - 1, int(key) % 256): (float(sums[key]), int(counts[key]))
        for key in np.flatnonzero(counts)
        if key >= 256
    }
