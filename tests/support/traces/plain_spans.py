"""Plain forms, in NumPy, of what the analyzer computes in C++ of the spans of a step."""

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.align.clocks import ClockModel
from megatronapp_analyzer.align.device_clocks import has_device_clock
from megatronapp_analyzer.graph.records import NESTED_KINDS, NOT_WORK_KINDS, durations_s, is_kind, starts_s
from megatronapp_analyzer.model import RankRecords, copy_rows, select_rows
from megatronapp_common.trace import DURATION_UNIT_NS, Flag, RecordKind


def plain_stream_rows(records: RankRecords) -> NDArray[np.int64]:
    """Return the rows of `records` that `stream` returns, in its order."""
    work = ~is_kind(records["kind"], NESTED_KINDS | NOT_WORK_KINDS)
    rows = np.flatnonzero(work & (records["start_ns"] <= step_ends_ns(records)[records["rank"]]))
    rank, start = records["rank"][rows], records["start_ns"][rows]
    if is_in_order(rank, start):
        return rows
    return rows[np.lexsort((start, rank))]


def is_in_order(rank: NDArray[np.int32], start: NDArray[np.uint64]) -> bool:
    """Return true where records are sorted by rank, then start, as those of a hub are: sorting costs more."""
    follows = (rank[1:] > rank[:-1]) | ((rank[1:] == rank[:-1]) & (start[1:] >= start[:-1]))
    return bool(follows.all())


def step_ends_ns(records: RankRecords) -> NDArray[np.uint64]:
    """Return the end of each rank's step; the end of time where its STEP record is missing or saturated."""
    ends = np.full(int(records["rank"].max(initial=-1)) + 1, np.iinfo(np.uint64).max)
    is_whole = (records["kind"] == RecordKind.STEP) & ((records["flags"] & Flag.SATURATED) == 0)
    steps = select_rows(records, is_whole)
    ends[steps["rank"]] = steps["start_ns"] + steps["duration"].astype(np.uint64) * np.uint64(DURATION_UNIT_NS)
    return ends


def plain_laid_out_s(spans: RankRecords, origin_ns: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of each span of `stream` in seconds, cut so that no two spans of a rank overlap.

    Transfers that are posted together share their start; the later one then begins where the earlier ended.
    """
    start = starts_s(spans, origin_ns)
    end = start + durations_s(spans)
    if not len(spans):
        return start, end
    far = (end.max() - start.min() + 1.0) * spans["rank"].astype(np.float64)
    reached = np.maximum.accumulate(end + far) - far
    same = np.flatnonzero(spans["rank"][1:] == spans["rank"][:-1]) + 1
    begin = start.copy()
    begin[same] = np.maximum(start[same], reached[same - 1])
    return begin, np.maximum(end, begin)


def plain_shifted(model: ClockModel, records: RankRecords) -> RankRecords:
    """Return records on the clock of the first rank, as `ClockModel.apply` does."""
    moved = copy_rows(records)
    shift = model.offset_ns[records["rank"]]
    shift += np.where(has_device_clock(records), model.devices.offset_ns[records["rank"]], 0)
    moved["start_ns"] = (records["start_ns"].astype(np.int64) - shift).astype(np.uint64)
    return moved
