"""Spans of a simulated block as trace records, on the clocks of their nodes."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from detect.layout import Grid
from detect.protocol import RANK_RECORD
from megatronapp_common.trace import DURATION_UNIT_NS, NO_COMM, NO_MICROBATCH, RecordKind

Floats = NDArray[np.float64]
UPTIME_NS = 10**15
"""Every clock has run for long, so that no offset makes it negative."""


@dataclasses.dataclass(frozen=True)
class SpanColumn:
    """The same span on all ranks of a stage in all steps of a block; times are arrays [step, replica, tensor rank]."""

    kind: RecordKind
    start: Floats
    end: Floats
    microbatch: int = NO_MICROBATCH
    chunk: int = 0
    slot: int = NO_COMM
    ordinal: int = 0
    aux: Floats | float = 0.0
    """Seconds, written in units of durations."""
    flags: int = 0
    steps: NDArray[np.bool_] | None = None
    """Steps of the block that have this span, if not all."""

    def shifted(self, seconds: Floats) -> "SpanColumn":
        return dataclasses.replace(self, start=self.start + seconds, end=self.end + seconds)


class Recorder:
    """Writes the records of steps."""

    def __init__(self, grid: Grid, offset_s: Floats, drift: Floats) -> None:
        self._grid = grid
        self._offset_s = offset_s
        self._drift = drift

    def records(self, columns: list[list[SpanColumn]], step: int, place: int, origin_s: float) -> NDArray[np.void]:
        """Return the records of step `place` of a block, sorted by rank, then start."""
        parts = [self._stage(stage, own, step, place, origin_s) for stage, own in enumerate(columns)]
        return np.concatenate(parts)

    def _stage(self, stage: int, columns: list[SpanColumn], step: int, place: int, origin_s: float) -> NDArray[np.void]:
        there = [column for column in columns if column.steps is None or column.steps[place]]
        size = self._grid.stage_size
        first = stage * size
        out = np.zeros((size, len(there)), RANK_RECORD)
        start = np.stack([column.start[place].ravel() for column in there], axis=1) + origin_s
        length = np.stack([(column.end[place] - column.start[place]).ravel() for column in there], axis=1)
        aux = np.stack([np.broadcast_to(_of(column.aux, place), size) for column in there], axis=1)
        offset, drift = (values[first : first + size, None] for values in (self._offset_s, self._drift))
        out["start_ns"] = np.rint((start + offset + drift * start) * 1e9).astype(np.int64) + UPTIME_NS
        out["duration"] = _units(length)
        out["aux"] = _units(aux)
        out["step"] = step
        out["rank"] = (first + np.arange(size))[:, None]
        for name, values in (
            ("ordinal", [column.ordinal for column in there]),
            ("comm", [column.slot for column in there]),
            ("microbatch", [column.microbatch for column in there]),
            ("kind", [int(column.kind) for column in there]),
            ("chunk", [column.chunk for column in there]),
            ("flags", [column.flags for column in there]),
        ):
            out[name] = np.array(values)[None, :]
        if any(column.kind == RecordKind.STOPPED for column in there):
            return _in_order(out.ravel())
        return out.ravel()


def _in_order(records: NDArray[np.void]) -> NDArray[np.void]:
    """Drop stops of ranks that were not stopped, and sort by rank and start."""
    there = records[(records["kind"] != RecordKind.STOPPED) | (records["duration"] > 0)]
    ordered: NDArray[np.void] = there[np.lexsort((there["start_ns"], there["rank"]))]
    return ordered


def _of(aux: Floats | float, place: int) -> Floats:
    return aux[place].ravel() if isinstance(aux, np.ndarray) else np.array([aux])


def _units(seconds: Floats) -> NDArray[np.uint32]:
    return np.minimum(seconds * (1e9 / DURATION_UNIT_NS), 2**32 - 1).astype(np.uint32)
