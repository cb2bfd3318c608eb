"""Figures of one step that every part of its timeline needs, computed once for a step. Pure NumPy."""

import dataclasses
import math
import threading
from collections.abc import Mapping

import cachetools
import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.matching import messages_of
from megatronapp_analyzer.graph.records import CommIndex
from megatronapp_analyzer.hub.ingest.digest import durations_ns, is_kind
from megatronapp_analyzer.hub.ingest.store import StepKey, StoredStep
from megatronapp_analyzer.model import Communicator, JobLayout, RankRecords
from megatronapp_common.topology import RankRole
from megatronapp_common.trace import P2P_KINDS, RecordKind

CACHED_STEPS = 3
CACHED_BYTES = 256 << 20
"""Memory of the figures that are cached with their records, besides those of the newest request."""
SAMPLE_KINDS = frozenset({RecordKind.WORK, RecordKind.METRIC, RecordKind.COUNTER})
"""Records that are no spans."""
Ints = NDArray[np.int64]
Places = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepColumns:
    """Columns of a step next to its records, in their order, and its tracks: one per rank, forward ranks first."""

    records: RankRecords
    origin_ns: int
    """Real time of the earliest start."""
    starts_ns: Ints
    """Starts after the origin."""
    is_span: NDArray[np.bool_]
    peer: Places
    """Rank at the other end of a transfer; -1 elsewhere."""
    receive_of: Places
    """Place of the receive of a message at the place of its send; -1 elsewhere."""
    send_of: Places
    track_ranks: Ints
    """Rank of each track."""
    track_begin: Ints
    """Places of the records of a track: `track_begin` to `track_end`, without it."""
    track_end: Ints
    from_ns: int
    to_ns: int
    """Time that the spans cover, after the origin."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the columns and the records, which the store may no longer have."""
        columns = (
            self.records,
            self.starts_ns,
            self.is_span,
            self.peer,
            self.receive_of,
            self.send_of,
            self.track_ranks,
        )
        return sum(column.nbytes for column in columns)


def columns_of(step: StoredStep, layout: JobLayout | None) -> StepColumns:
    """Return the columns of a step with at least one record; `layout`: of its attempt, for the roles of its ranks."""
    records = step.view.records
    starts = records["start_ns"].astype(np.int64) + step.offsets_ns[records["rank"]]
    origin = int(starts.min())
    starts -= origin
    is_span = ~is_kind(records, SAMPLE_KINDS)
    ranks, begin = np.unique(records["rank"].astype(np.int64), return_index=True)
    end = np.append(begin[1:], len(records))
    order = np.argsort([_is_backward(layout, rank) for rank in ranks.tolist()], kind="stable")
    ends = (starts + durations_ns(records))[is_span]
    peer, receive_of, send_of = _messages(records, step.view.comms)
    return StepColumns(
        records=records,
        origin_ns=origin,
        starts_ns=starts,
        is_span=is_span,
        peer=peer,
        receive_of=receive_of,
        send_of=send_of,
        track_ranks=ranks[order],
        track_begin=begin[order].astype(np.int64),
        track_end=end[order].astype(np.int64),
        from_ns=int(starts[is_span].min(initial=np.iinfo(np.int64).max)) if len(ends) else 0,
        to_ns=int(ends.max(initial=0)) if len(ends) else 1,
    )


def _is_backward(layout: JobLayout | None, rank: int) -> bool:
    roles = () if layout is None else layout.roles
    return rank < len(roles) and roles[rank] is RankRole.BACKWARD


def _messages(records: RankRecords, comms: Mapping[int, Mapping[int, Communicator]]) -> tuple[Places, Places, Places]:
    """Return the other end of every transfer, and where the other half of its message is."""
    index = CommIndex(comms)
    pairs = np.array(
        [comm.members if comm.kind == "p2p" and len(comm.members) == 2 else (-1, -1) for comm in index.members]
        or [(-1, -1)],
        np.int64,
    )
    numbers = index.numbers(records)
    transfers = np.flatnonzero(is_kind(records, P2P_KINDS | {RecordKind.COPY}) & (numbers >= 0))
    source, destination = pairs[numbers[transfers]].T
    peer = np.full(len(records), -1, np.int32)
    peer[transfers] = np.where(records["rank"][transfers] == source, destination, source)
    messages = messages_of(records, index)
    send = np.where(messages.send_post >= 0, messages.send_post, messages.send_wait)
    receive = np.where(messages.recv_wait >= 0, messages.recv_wait, messages.recv_post)
    known = (send >= 0) & (receive >= 0)
    receive_of, send_of = np.full(len(records), -1, np.int32), np.full(len(records), -1, np.int32)
    receive_of[send[known]] = receive[known]
    send_of[receive[known]] = send[known]
    return peer, receive_of, send_of


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    columns: StepColumns
    offsets_ns: Ints
    layout: JobLayout | None

    def is_of(self, step: StoredStep, layout: JobLayout | None) -> bool:
        """Return true if nothing has changed on which the columns depend: records, clocks, roles of ranks."""
        is_same = self.columns.records is step.view.records and self.offsets_ns is step.offsets_ns
        return is_same and self.layout == layout


class ColumnsCache:
    """Columns of the steps that were requested last. Threads may share it; one computes at a time."""

    def __init__(self, limit_bytes: int = CACHED_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._known: cachetools.LRUCache[StepKey, _Entry] = cachetools.LRUCache(math.inf, _bytes_of)
        """Limited by `of`, which also stores one step that is larger than the limit."""

    def of(self, step: StoredStep, layout: JobLayout | None) -> StepColumns:
        """Return the columns of a step; computed again once it has more records or better clocks."""
        with self._lock:
            known = self._known.get(step.key)
            if known is None or not known.is_of(step, layout):
                known = _Entry(columns_of(step, layout), step.offsets_ns, layout)
                self._known[step.key] = known
            while len(self._known) > 1 and self._is_full():
                self._known.popitem()
            return known.columns

    def _is_full(self) -> bool:
        return len(self._known) > CACHED_STEPS or self._known.currsize > self._limit_bytes


def _bytes_of(entry: _Entry) -> int:
    return entry.columns.nbytes
