"""Stops of a rank, and by how much they lengthened what its device did.

Its process was stopped, or Python collected garbage in one of its threads, for which all others wait.

A device continues with what has been launched while its host is stopped, and waits for the rest: a stop lengthens a
span by anything from nothing to its own length, and by nothing after the last launch for the span.
"""

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.model import RankRecords
from megatronapp_common.trace import DURATION_UNIT_NS, PASS_KINDS, Flag, RecordKind

Seconds = NDArray[np.float64]
Ranks = NDArray[np.integer]
Groups = NDArray[np.int64]
STOP_KINDS = frozenset({RecordKind.STOPPED, RecordKind.GC})
HOST_DRIVEN_KINDS = PASS_KINDS | {RecordKind.DATA, RecordKind.GRAD_NORM, RecordKind.OPTIMIZER}
"""Spans that a stop lengthens. In the others a device waits for other ranks, also while its host runs."""
UNDISTURBED_PART = 0.25
"""Part of a rank's alike spans that must lie between stops to be what is usual for it."""


class Stops:
    """The stops in the records of a step, in seconds after `origin_ns`: a process may be stopped while it collects."""

    def __init__(self, records: RankRecords, origin_ns: int) -> None:
        stops = records[rec.is_kind(records["kind"], STOP_KINDS)]
        self.any = len(stops) > 0
        if not self.any:
            return
        stops = stops[np.lexsort((stops["start_ns"], stops["rank"]))]
        start, end = rec.laid_out_s(stops, origin_ns)
        low, high = float(start.min()), float(end.max())
        self._low, self._high = low, high
        self._apart = high - low + 1.0
        shift = self._apart * stops["rank"].astype(np.float64)
        self._time = np.stack([start + shift, end + shift], axis=1).ravel()
        stopped = np.cumsum(end - start)
        self._stopped = np.stack([stopped - (end - start), stopped], axis=1).ravel()

    def within(self, rank: Ranks, start_s: Seconds, end_s: Seconds) -> Seconds:
        """Return the seconds between `start_s` and `end_s` in which each rank was stopped."""
        if not self.any:
            return np.zeros(len(start_s))
        out: Seconds = np.maximum(self._before(rank, end_s) - self._before(rank, start_s), 0.0)
        return out

    def _before(self, rank: Ranks, moment_s: Seconds) -> Seconds:
        place = np.clip(moment_s, self._low, self._high) + self._apart * rank.astype(np.float64)
        out: Seconds = np.interp(place, self._time, self._stopped)
        return out


def launched_s(spans: RankRecords, start_s: Seconds, end_s: Seconds) -> Seconds:
    """Return when the host had launched each span, between its start and end; its end where that is not recorded."""
    has_lead = (spans["flags"] & Flag.AUX_LEAD) != 0
    lead_s = np.where(has_lead, spans["aux"].astype(np.float64) * (DURATION_UNIT_NS * rec.NS), 0.0)
    out: Seconds = np.maximum(end_s - lead_s, start_s)
    return out


def lengthened_by_stops_s(spans: RankRecords, start_s: Seconds, end_s: Seconds, stops: Stops) -> Seconds:
    """Return by how much stops lengthened each host-driven span of a device, in seconds; 0 for all other spans.

    `spans` may be of several ranks; those of a kind and chunk on one rank are alike.
    """
    out = np.zeros(len(spans))
    driven = np.flatnonzero(rec.is_kind(spans["kind"], HOST_DRIVEN_KINDS)) if stops.any else np.empty(0, np.int64)
    if not len(driven):
        return out
    chosen, start, end = spans[driven], start_s[driven].copy(), end_s[driven]
    meets = chosen["kind"] == RecordKind.GRAD_NORM
    if meets.any():  # until the last rank has come to it, a device waits for others
        start[meets] = np.minimum(start[meets].max(), end[meets])
    work = (chosen["kind"].astype(np.int64) << 8) | chosen["chunk"]
    stopped = stops.within(chosen["rank"], start, launched_s(chosen, start, end))
    out[driven] = lengthening_s((chosen["rank"].astype(np.int64) << 16) | work, end - start, stopped)
    return out


def lengthening_s(group: Groups, seconds: Seconds, stopped_s: Seconds) -> Seconds:
    """Return by how much each span is longer than usual for its group, up to the time in which it was stopped.

    What makes all spans of a group longer is none of it. Usual is the median of those that no stop disturbed; where
    these are too few, the median of all without their stops, which is too low for a device that continued.
    """
    out = np.zeros(len(seconds))
    disturbed = stopped_s > LEAST_STOP_S
    for number in np.unique(group[disturbed]):
        own = np.flatnonzero(group == number)
        calm = own[~disturbed[own]]
        if len(calm) >= max(UNDISTURBED_PART * len(own), 1):
            usual = float(np.median(seconds[calm]))
        else:
            usual = float(np.median(seconds[own] - stopped_s[own]))
        out[own] = np.clip(seconds[own] - usual, 0.0, stopped_s[own])
    return out


LEAST_STOP_S = DURATION_UNIT_NS * 1e-9
"""A shorter stop is an error of rounding."""
