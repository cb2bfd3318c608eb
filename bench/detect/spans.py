"""Spans of a simulated block as trace records, on the clocks of their nodes."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from detect.layout import Grid
from detect.protocol import RANK_RECORD
from megatronapp_common.trace import DURATION_UNIT_NS, NO_COMM, NO_MICROBATCH, RecordKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STOP_KINDS = (RecordKind.STOPPED, RecordKind.GC)
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

    def steps(self, columns: list[list[SpanColumn]], numbers: Ints, origins_s: Floats) -> Iterator[NDArray[np.void]]:
        """Yield the records of each step of a block, sorted by rank, then start.

        `columns` are those of each stage; `numbers` and `origins_s` are of the steps.
        """
        stages = [(own, self._stage(stage, own, numbers, origins_s)) for stage, own in enumerate(columns)]
        some = {stage for stage, own in enumerate(columns) if any(column.steps is not None for column in own)}
        stopped = any(column.kind in STOP_KINDS for own in columns for column in own)
        for place in range(len(numbers)):
            parts = [
                _of_step(own, records, place) if stopped or stage in some else records[place].ravel()
                for stage, (own, records) in enumerate(stages)
            ]
            yield np.concatenate(parts)

    def _stage(self, stage: int, columns: list[SpanColumn], numbers: Ints, origins_s: Floats) -> NDArray[np.void]:
        """Return the records of a stage, [step, rank, column]."""
        size, steps = self._grid.stage_size, len(numbers)
        first = stage * size
        out = np.zeros((steps, size, len(columns)), RANK_RECORD)
        start, length, aux = np.empty(out.shape), np.empty(out.shape), np.empty(out.shape)
        for place, column in enumerate(columns):
            start[:, :, place] = column.start.reshape(steps, size)
            length[:, :, place] = (column.end - column.start).reshape(steps, size)
            aux[:, :, place] = column.aux.reshape(steps, size) if isinstance(column.aux, np.ndarray) else column.aux
        start += origins_s[:, None, None]
        offset, drift = (values[None, first : first + size, None] for values in (self._offset_s, self._drift))
        out["start_ns"] = np.rint((start + offset + drift * start) * 1e9).astype(np.int64) + UPTIME_NS
        out["duration"] = _units(length)
        out["aux"] = _units(aux)
        out["step"] = numbers[:, None, None]
        out["rank"] = (first + np.arange(size))[None, :, None]
        for name, values in (
            ("ordinal", [column.ordinal for column in columns]),
            ("comm", [column.slot for column in columns]),
            ("microbatch", [column.microbatch for column in columns]),
            ("kind", [int(column.kind) for column in columns]),
            ("chunk", [column.chunk for column in columns]),
            ("flags", [column.flags for column in columns]),
        ):
            out[name] = np.array(values)[None, None, :]
        return out


def _of_step(columns: list[SpanColumn], records: NDArray[np.void], place: int) -> NDArray[np.void]:
    """Return the records of a stage in one step, in order, without the columns that this step does not have."""
    there = [column.steps is None or bool(column.steps[place]) for column in columns]
    own: NDArray[np.void] = records[place] if all(there) else records[place][:, np.array(there)]
    if any(column.kind in STOP_KINDS for column, has in zip(columns, there, strict=True) if has):
        return _in_order(own.ravel())
    flat: NDArray[np.void] = own.ravel()
    return flat


def _in_order(records: NDArray[np.void]) -> NDArray[np.void]:
    """Drop stops and collections of ranks that have none, and sort by rank and start."""
    there = records[~np.isin(records["kind"], STOP_KINDS) | (records["duration"] > 0)]
    ordered: NDArray[np.void] = there[np.lexsort((there["start_ns"], there["rank"]))]
    return ordered


def _units(seconds: Floats) -> NDArray[np.uint32]:
    return np.minimum(seconds * (1e9 / DURATION_UNIT_NS), 2**32 - 1).astype(np.uint32)
