"""Times in which the process of a rank was stopped, which are no time of its spans."""

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.model import RankRecords
from megatronapp_common.trace import RecordKind

Seconds = NDArray[np.float64]
Ranks = NDArray[np.integer]


class Stops:
    """The STOPPED records of a step, in seconds after `origin_ns`."""

    def __init__(self, records: RankRecords, origin_ns: int) -> None:
        stops = records[records["kind"] == RecordKind.STOPPED]
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
