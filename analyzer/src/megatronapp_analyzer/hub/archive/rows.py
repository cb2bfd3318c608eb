"""Rows of the archive: records with the ring that they are from and their index in it. Pure NumPy."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.ingest.ingest import RingKey, read_body
from megatronapp_analyzer.model import RANK_RECORD, RankRecords, select_rows
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.trace import RECORD, RecordKind

ROW = np.dtype([*RECORD.descr, ("rank", "<i4"), ("worker", "<i4"), ("index", "<i8"), ("offset_ns", "<i8")])
"""A record, its rank (-1: the ring of a worker), its worker, its index in the ring, and real time minus its clock."""
NO_RANK = -1
Rows = NDArray[np.void]
_MAX_RANK = 2**31 - 2
_MAX_INDEX = 2**62
_SAMPLE_BIT, _STEP_SHIFT, _RANK_MASK = np.uint64(63), np.uint64(31), np.uint64(0x7FFF_FFFF)


@dataclasses.dataclass(slots=True)
class RingRange:
    """Indices of the records of a ring in a file: from `first` to `next`, without it; some may be lost."""

    first: int
    next: int


@dataclasses.dataclass(kw_only=True, slots=True)
class CollectedRows:
    """Records of some frames, each once, and what was wrong with the frames."""

    rows: Rows
    rings: dict[RingKey, RingRange]
    malformed: int = 0
    """Number of frames that are no records of a ring."""


@dataclasses.dataclass(slots=True)
class _Run:
    rank: int
    worker: int
    first: int
    records: NDArray[np.void]


def collect(frames: Iterable[Frame], next_index: Mapping[RingKey, int]) -> CollectedRows:
    """Return the records of RECORDS frames in their order, without those below the `next_index` of their ring.

    Frames that are malformed are counted and skipped; those of other types are skipped.
    """
    rings: dict[RingKey, RingRange] = {}
    runs: list[_Run] = []
    malformed = 0
    for frame in frames:
        if frame.type != FrameType.RECORDS:
            continue
        try:
            run = _run(frame)
        except (KeyError, TypeError, ValueError, OverflowError, ProtocolError):
            malformed += 1
            continue
        key = (run.worker, None if run.rank == NO_RANK else run.rank)
        known = rings.get(key)
        skip = max((next_index.get(key, 0) if known is None else known.next) - run.first, 0)
        if skip >= len(run.records):
            continue
        run.first, run.records = run.first + skip, run.records[skip:]
        if known is None:
            known = rings[key] = RingRange(run.first, run.first)
        known.next = run.first + len(run.records)
        runs.append(run)
    return CollectedRows(rows=_rows(runs), rings=rings, malformed=malformed)


def _run(frame: Frame) -> _Run:
    header = frame.header
    rank = NO_RANK if header["rank"] is None else int(header["rank"])
    worker, first = int(header["worker"]), int(header["first"])
    is_ring = NO_RANK <= rank <= _MAX_RANK and 0 <= worker <= _MAX_RANK and 0 <= first < _MAX_INDEX
    if not is_ring or (header["rank"] is not None and rank < 0):
        raise ValueError(f"no ring: rank {rank}, worker {worker}, first {first}")
    return _Run(rank, worker, first, read_body(frame.body))


def _rows(runs: list[_Run]) -> Rows:
    sizes = np.array([len(run.records) for run in runs], np.int64)
    rows = np.zeros(int(sizes.sum()), ROW)
    if not len(rows):
        return rows
    bytes_of = rows.view(np.uint8).reshape(-1, ROW.itemsize)
    # As bytes, which are copied at once: structured records are copied field by field.
    records = np.concatenate([run.records.view(np.uint8) for run in runs])
    bytes_of[:, : RECORD.itemsize] = records.reshape(len(rows), -1)
    rows["rank"] = np.repeat(np.array([run.rank for run in runs], np.int32), sizes)
    rows["worker"] = np.repeat(np.array([run.worker for run in runs], np.int32), sizes)
    begin = np.cumsum(sizes) - sizes
    first = np.array([run.first for run in runs], np.int64)
    rows["index"] = np.arange(len(rows)) + np.repeat(first - begin, sizes)
    return rows


def is_sample(rows: Rows) -> NDArray[np.bool_]:
    """Return which rows are samples of metrics and counters, or of kinds that a newer release may have as such."""
    samples: NDArray[np.bool_] = rows["kind"] >= RecordKind.METRIC
    return samples


def sorted_rows(rows: Rows) -> tuple[Rows, int]:
    """Return rows sorted by step, rank and start, spans before samples, and the number of spans.

    Rows of the ring of a worker follow those of the ranks. Equal rows stay in their order.
    """
    samples = is_sample(rows)
    key = samples.astype(np.uint64) << _SAMPLE_BIT
    key |= rows["step"].astype(np.uint64) << _STEP_SHIFT
    key |= rows["rank"].astype(np.int64).view(np.uint64) & _RANK_MASK
    order = np.lexsort((rows["start_ns"], key))
    return select_rows(rows, order), int(len(rows) - samples.sum())


def real_ns(rows: Rows) -> NDArray[np.int64]:
    """Return the start of each row in nanoseconds since 1970. Clocks of garbled records wrap around."""
    start: NDArray[np.int64] = rows["start_ns"].view(np.int64) + rows["offset_ns"]
    return start


def rank_records(rows: Rows) -> RankRecords:
    """Return rows of ranks as the records of a step, in the same order."""
    records = np.empty(len(rows), RANK_RECORD)
    source = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, ROW.itemsize)
    records.view(np.uint8).reshape(-1, RANK_RECORD.itemsize)[:] = source[:, : RANK_RECORD.itemsize]
    return records


def frames_of(rows: Rows) -> Iterator[Frame]:
    """Yield rows of a file as RECORDS frames: records of each ring in the order of their indices, steps ascending.

    No rank is ahead of another one by more than a step, as `StepAssembler` needs.
    """
    if not len(rows):
        return
    ring = rows["rank"].astype(np.int64) << 32 | rows["worker"]
    in_ring = np.lexsort((rows["index"], ring))
    ring, step = ring[in_ring], rows["step"][in_ring].astype(np.int64)
    # A record that follows a later step in its ring is sent with that one.
    number = np.cumsum(np.diff(ring, prepend=ring[0]) != 0)
    newest = np.maximum.accumulate(step + (number << 32)) - (number << 32)
    index = rows["index"][in_ring]
    order = np.lexsort((index, ring, newest))
    ring, newest, index = ring[order], newest[order], index[order]
    changes = (np.diff(ring) != 0) | (np.diff(newest) != 0) | (np.diff(index) != 1)
    chosen = select_rows(rows, in_ring[order])
    for part in np.split(chosen, np.flatnonzero(changes) + 1):
        yield _frame(part)


def _frame(part: Rows) -> Frame:
    rank = int(part["rank"][0])
    header: dict[str, Any] = {
        "rank": None if rank == NO_RANK else rank,
        "worker": int(part["worker"][0]),
        "first": int(part["index"][0]),
        "lost": 0,
    }
    body = np.ascontiguousarray(part).view(np.uint8).reshape(-1, ROW.itemsize)[:, : RECORD.itemsize]
    return Frame(FrameType.RECORDS, header, body.tobytes())
