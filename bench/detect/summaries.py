"""Sums of a step for simple detectors: seconds of each rank in each kind of span. No analysis of waits."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from detect.protocol import StepTrace
from megatronapp_common.trace import DURATION_UNIT_NS, Flag, RecordKind

Floats = NDArray[np.float64]
_KINDS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Arrays over ranks, NaN where a rank has no such record."""

    total_s: Floats
    """[kind, rank] seconds in spans of each kind, without run-queue delay."""
    start_s: Floats
    """[kind, rank] start of the last span of each kind, on the clock of the rank's node."""
    step_s: float
    """Median length of the step."""

    def of(self, kind: RecordKind) -> Floats:
        row: Floats = self.total_s[int(kind)]
        return row

    @property
    def compute_s(self) -> Floats:
        return self.of(RecordKind.FORWARD) + self.of(RecordKind.BACKWARD)


def summarise(trace: StepTrace) -> Summary:
    """Add up a step; where records are lost, totals are scaled up to the usual number of spans."""
    records, world = trace.records, trace.grid.world
    kind, rank = records["kind"].astype(np.int64), records["rank"].astype(np.int64)
    seconds = records["duration"].astype(np.float64) * (DURATION_UNIT_NS * 1e-9)
    queued = np.where((records["flags"] & Flag.AUX_RUN_QUEUE) != 0, records["aux"].astype(np.float64), 0.0)
    seconds = np.maximum(seconds - queued * (DURATION_UNIT_NS * 1e-9), 0.0)
    place = kind * world + rank
    total = np.bincount(place, seconds, minlength=_KINDS * world).reshape(_KINDS, world).astype(np.float64)
    count = np.bincount(place, minlength=_KINDS * world).reshape(_KINDS, world)
    usual = count.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.where(count > 0, total * usual / count, np.nan)
    start = np.full(_KINDS * world, np.nan)
    np.fmax.at(start, place, records["start_ns"].astype(np.float64) * 1e-9)
    steps = total[int(RecordKind.STEP)]
    return Summary(
        total_s=total,
        start_s=start.reshape(_KINDS, world),
        step_s=float(np.nanmedian(steps)) if np.isfinite(steps).any() else np.nan,
    )


def group_medians(values: Floats, group: NDArray[np.int64]) -> Floats:
    """Return for each column the median of the finite values of its group."""
    out = np.full(len(values), np.nan)
    for number in np.unique(group):
        inside = values[group == number]
        if np.isfinite(inside).any():
            out[group == number] = np.nanmedian(inside)
    return out
