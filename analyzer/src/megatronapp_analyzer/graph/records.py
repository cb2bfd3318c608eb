"""Selection of the records of a step that take part in its graph, and their times as arrays."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.model import Communicator, RankRecords, select_rows
from megatronapp_common.trace import COLLECTIVE_KINDS, DURATION_UNIT_NS, NO_COMM, Flag, RecordKind
from megatronapp_native import SpanFormat, span_columns, summarize_rows, take_rows
from megatronapp_native import stream_rows as native_stream_rows

NESTED_KINDS = frozenset(
    {RecordKind.TP_REDUCE, RecordKind.TP_GATHER, RecordKind.LAYER_FORWARD, RecordKind.LAYER_BACKWARD, RecordKind.GC}
)
"""Spans that lie inside a compute span."""
NOT_WORK_KINDS = frozenset(
    {
        RecordKind.STEP,
        RecordKind.COPY,
        RecordKind.NCCL,
        RecordKind.FAULT,
        RecordKind.STOPPED,
        RecordKind.WORK,
        RecordKind.METRIC,
        RecordKind.COUNTER,
    }
)
"""Frames around work, what other threads do, times without any work, notes for users, samples.

FAULT is ground truth for demonstrations: analysis must never use it.
"""
GROUP_KINDS = COLLECTIVE_KINDS - NESTED_KINDS
"""Collectives that are entries of a rank's stream, outside any compute span."""

NS = 1e-9
FEW_KINDS = 1 << 12
"""Kinds of records up to which a table is faster than to compare them with each wanted one."""


@functools.cache
def _mask_of(kinds: frozenset[RecordKind]) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[[int(kind) for kind in kinds]] = True
    table.flags.writeable = False
    return table


_FORMAT = SpanFormat(
    left_out=_mask_of(NESTED_KINDS | NOT_WORK_KINDS),
    step_kind=int(RecordKind.STEP),
    saturated_flag=int(Flag.SATURATED),
    run_queue_flag=int(Flag.AUX_RUN_QUEUE),
)
CommTables = Mapping[int, Mapping[int, Communicator]]
"""Communicators of each rank by slot."""


def is_kind(kinds: NDArray[np.uint8], wanted: frozenset[RecordKind]) -> NDArray[np.bool_]:
    """Return a mask of records whose kind is among `wanted`."""
    if len(kinds) < FEW_KINDS:
        found: NDArray[np.bool_] = _mask_of(wanted)[kinds]
        return found
    mask = np.zeros(len(kinds), np.bool_)
    contiguous = np.ascontiguousarray(kinds)
    for kind in wanted:
        mask |= contiguous == kind
    return mask


def stream(records: RankRecords) -> RankRecords:
    """Return spans that follow each other on a rank, sorted by rank, then start.

    What begins after a rank's STEP span has ended (evaluation, checkpoint) belongs to no step.
    """
    return select_rows(records, stream_rows(records))


def stream_rows(records: RankRecords) -> NDArray[np.int64]:
    """Return the rows of `records` that `stream` returns, in its order."""
    rows, in_order = native_stream_rows(bytes_of(records), _FORMAT)
    if in_order:  # as those of a hub are: sorting costs more
        return rows
    return rows[np.lexsort((records["start_ns"][rows], records["rank"][rows]))]


def rows_of(records: RankRecords, rows: NDArray[np.int64]) -> RankRecords:
    """Return rows of records by number, as `select_rows`, with the threads that the process may use."""
    taken: RankRecords = take_rows(bytes_of(records), rows).view(records.dtype)
    return taken


def bytes_of(records: RankRecords) -> NDArray[np.uint8]:
    """Return the memory of records, for native functions; copied if they are not contiguous."""
    return np.ascontiguousarray(records).view(np.uint8)


def durations_s(records: RankRecords) -> NDArray[np.float64]:
    """Return the wall time of each span in seconds."""
    out: NDArray[np.float64] = records["duration"].astype(np.float64) * (DURATION_UNIT_NS * NS)
    return out


def run_queue_s(records: RankRecords) -> NDArray[np.float64]:
    """Return the run-queue delay inside each span in seconds; 0 where the span does not carry it."""
    carries = (records["flags"] & Flag.AUX_RUN_QUEUE) != 0
    return np.where(carries, records["aux"].astype(np.float64) * (DURATION_UNIT_NS * NS), 0.0)


def clean_s(records: RankRecords) -> NDArray[np.float64]:
    """Return the time of each span without its run-queue delay, in seconds, never negative."""
    return np.maximum(durations_s(records) - run_queue_s(records), 0.0)


def starts_s(records: RankRecords, origin_ns: int) -> NDArray[np.float64]:
    """Return the start of each span in seconds after `origin_ns`."""
    return (records["start_ns"].astype(np.int64) - origin_ns).astype(np.float64) * NS


def laid_out_s(spans: RankRecords, origin_ns: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of each span of `stream` in seconds, cut so that no two spans of a rank overlap.

    Transfers that are posted together share their start; the later one then begins where the earlier ended.
    """
    columns = columns_of(spans, origin_ns)
    return columns.start_s, columns.end_s


@dataclasses.dataclass(frozen=True, slots=True)
class RecordColumns:
    """Columns of all records of a step, contiguous in memory, and sums over them."""

    kind: NDArray[np.uint8]
    rank: NDArray[np.int32]
    count: NDArray[np.int64]
    """Number of records of each kind."""
    flags: int
    """Flags that some record has."""
    greatest_rank: int
    """-1 without records."""
    start_ns: int
    """Earliest start; without records the largest number."""

    @classmethod
    def of(cls, records: RankRecords) -> "RecordColumns":
        """Read the columns of records in any order."""
        return cls(*summarize_rows(bytes_of(records)))


@dataclasses.dataclass(frozen=True, slots=True)
class SpanColumns:
    """Columns of the spans of a step, contiguous in memory."""

    start_s: NDArray[np.float64]
    """Start and end as `laid_out_s` gives them."""
    end_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    queue_s: NDArray[np.float64]
    """Run-queue delay inside each span; 0 where the span does not carry it."""
    rank: NDArray[np.int64]
    kind: NDArray[np.uint8]
    flags: NDArray[np.uint8]


def columns_of(spans: RankRecords, origin_ns: int) -> SpanColumns:
    """Return the columns of spans of `stream`."""
    return SpanColumns(*span_columns(bytes_of(spans), origin_ns, _FORMAT))


WORLD = "world"
"""Kind of the communicator of all ranks of a role."""


class CommIndex:
    """Dense numbers for the communicators of all ranks: the same members and kind get the same number everywhere.

    All ranks of a role meet, too, in a communicator that no table lists, as it would be in the table of each of them.
    It has a number here: its members are the ranks that groups connect, directly or through other ranks.
    """

    def __init__(self, comms: CommTables) -> None:
        number: dict[Communicator, int] = {}
        slots = 1 + max((slot for table in comms.values() for slot in table), default=0)
        ranks = 1 + max(comms, default=0)
        self._lookup = np.full((ranks, slots), -1, np.int64)
        for rank, table in comms.items():
            known = [number.setdefault(comm, len(number)) for comm in table.values()]
            self._lookup[rank, list(table)] = known
        worlds = [(number.setdefault(world, len(number)), world.members) for world in _worlds(list(number))]
        self._world_of_rank = np.full(1 + max((members[-1] for _, members in worlds), default=0), -1, np.int64)
        for place, members in worlds:
            self._world_of_rank[list(members)] = place
        self.members = list(number)
        self.pairs = np.array([_pair(comm) for comm in self.members] or [(-1, -1)], np.int64)
        """Source and destination of each directed pair; -1 of a communicator that is none."""
        self.sizes = np.array([len(comm.members) for comm in self.members] or [0], np.int64)
        self.kinds = list(dict.fromkeys(["p2p", *(comm.kind for comm in self.members)]))
        """Kinds of communicators, messages first."""
        self.kind_of = np.array([self.kinds.index(comm.kind) for comm in self.members], np.int64)
        """Number of the kind of each communicator."""

    @property
    def lookup(self) -> NDArray[np.int64]:
        """Number of the communicator by [rank, slot]; -1 without."""
        return self._lookup

    def numbers(self, records: RankRecords) -> NDArray[np.int64]:
        """Return the communicator number of each record; -1 where it has none or its slot is unknown."""
        ranks, slots = self._lookup.shape
        rank = records["rank"].astype(np.int64)
        slot = records["comm"].astype(np.int64)
        known = (slot != NO_COMM) & (slot < slots) & (rank >= 0) & (rank < ranks)
        out = np.full(len(records), -1, np.int64)
        out[known] = self._lookup[rank[known], slot[known]]
        return out

    def worlds(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the communicator of all ranks of each rank's role; -1 where no group has the rank."""
        known = (ranks >= 0) & (ranks < len(self._world_of_rank))
        return np.where(known, self._world_of_rank[np.where(known, ranks, 0)], -1)


def _worlds(comms: Iterable[Communicator]) -> list[Communicator]:
    """Return the communicator of all ranks of each role; pairs connect also ranks of different roles."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while (above := parent.setdefault(rank, rank)) != rank:
            parent[rank] = rank = parent[above]
        return rank

    for comm in comms:
        if comm.kind != "p2p" and len(comm.members) > 1:
            first = root(comm.members[0])
            for member in comm.members:
                parent[root(member)] = first
    members: dict[int, list[int]] = {}
    for rank in sorted(parent):
        members.setdefault(root(rank), []).append(rank)
    return [Communicator(WORLD, tuple(ranks)) for ranks in members.values()]


def _pair(comm: Communicator) -> tuple[int, int]:
    if comm.kind != "p2p" or len(comm.members) != 2:
        return (-1, -1)
    return (comm.members[0], comm.members[1])


class _NewestIndex:
    """Index of the newest table of communicators: a job has one for all steps between two reports of its rings."""

    def __init__(self) -> None:
        self._newest: tuple[CommTables, CommIndex] | None = None

    def of(self, comms: CommTables) -> CommIndex:
        """Return the index of a table, which must not change afterwards."""
        newest = self._newest
        if newest is None or newest[0] is not comms:
            newest = self._newest = (comms, CommIndex(comms))
        return newest[1]


_NEWEST = _NewestIndex()


def comm_index(comms: CommTables) -> CommIndex:
    """Return the index of a table of communicators; a table that was given before is not read again."""
    return _NEWEST.of(comms)
