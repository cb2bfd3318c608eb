"""Transfer times of collectives on devices: the shortest record of an instance, which is that of its last member.

The kernel of a collective waits on each device for those that begin later, and its transfer begins with the last.
So its length there holds no wait, and needs no common clock.
"""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.features import Floats, Ints, Mask, segment_medians
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.matching import collectives_of
from megatronapp_analyzer.model import Communicator, RankRecords, StepRecords
from megatronapp_common.trace import FIRST_COLLECTIVE_MASK, NO_COMM, Flag, RecordKind

TENSOR_KINDS = frozenset({RecordKind.TP_REDUCE, RecordKind.TP_GATHER})
REPLICA_KINDS = frozenset({RecordKind.GRAD_REDUCE, RecordKind.PARAM_GATHER})
"""Collectives between replicas, once a step."""
TRANSFER_KINDS = TENSOR_KINDS | REPLICA_KINDS | {RecordKind.NCCL}
"""Records that `transfers_of` reads."""
TENSOR_GROUP, REPLICA_GROUP = "tp", "dp"
"""Kinds of communicators."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTransfers:
    """Transfer times of one step; all unknown without device clocks."""

    units_s: Floats
    """Median over the first collective of each kind in each pass of a unit, or all of NCCL; NaN where unknown."""
    units_by_nccl: Mask
    """True where NCCL's records say so; these are shorter, and to be compared with each other alone."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group that reduces gradients or gathers parameters."""
    groups_s: Floats
    """Seconds of these in the step, by group."""
    groups_by_nccl: Mask


def transfers_of(view: StepRecords, unit_of_rank: Ints) -> CollectiveTransfers:
    """Measure the transfers of a step; where NCCL's are recorded (`--trace-nccl`), by those.

    An instance that lacks a member's record counts for nothing.
    """
    units_s = _unit_transfers_s(view.records, unit_of_rank)
    totals = _group_transfers(view)
    units_by_nccl = np.zeros(len(units_s), np.bool_)
    by_nccl: set[tuple[int, ...]] = set()
    for communicator, seconds in _nccl_transfers(view):
        if communicator.kind == TENSOR_GROUP:
            unit = unit_of_rank[communicator.members[0]]
            units_s[unit], units_by_nccl[unit] = float(np.median(seconds)), True
        elif communicator.kind == REPLICA_GROUP:
            totals[communicator.members] = float(seconds.sum())
            by_nccl.add(communicator.members)
    return CollectiveTransfers(
        units_s=units_s,
        units_by_nccl=units_by_nccl,
        groups=tuple(totals),
        groups_s=np.array(list(totals.values()), np.float64),
        groups_by_nccl=np.array([group in by_nccl for group in totals], np.bool_),
    )


def _nccl_transfers(view: StepRecords) -> list[tuple[Communicator, Floats]]:
    """Return the seconds of the transfers in each communicator of which every instance is whole."""
    records = view.records[(view.records["kind"] == RecordKind.NCCL) & (view.records["comm"] != NO_COMM)]
    index = rec.comm_index(view.comms)
    numbers = index.numbers(records)
    records, numbers = records[numbers >= 0], numbers[numbers >= 0]
    key = (numbers << 40) | (records["layer"].astype(np.int64) << 32) | records["ordinal"].astype(np.int64)
    keys, row, count = np.unique(key, return_inverse=True, return_counts=True)
    shortest = np.full(len(keys), np.inf)
    np.minimum.at(shortest, row, rec.durations_s(records))
    found = []
    for number in np.unique(keys >> 40).tolist():
        own, communicator = (keys >> 40) == number, index.members[number]
        if len(communicator.members) > 1 and (count[own] == len(communicator.members)).all():
            found.append((communicator, shortest[own]))
    return found


def _unit_transfers_s(records: RankRecords, unit_of_rank: Ints) -> Floats:
    size = np.bincount(unit_of_rank)
    first = (records["ordinal"] & FIRST_COLLECTIVE_MASK) == 0
    on_device = (records["flags"] & Flag.DEVICE_CLOCK) != 0
    rows = np.flatnonzero(rec.is_kind(records["kind"], TENSOR_KINDS) & first & on_device)
    unit = unit_of_rank[records["rank"][rows]]
    key = (unit << 40) | (records["kind"][rows].astype(np.int64) << 32) | records["ordinal"][rows].astype(np.int64)
    keys, row, count = np.unique(key, return_inverse=True, return_counts=True)
    shortest = np.full(len(keys), np.inf)
    np.minimum.at(shortest, row, rec.durations_s(records[rows]))
    whole = count == size[keys >> 40]
    return segment_medians((keys >> 40)[whole], shortest[whole], len(size))


def _group_transfers(view: StepRecords) -> dict[tuple[int, ...], float]:
    """Return the seconds of the transfers between replicas of each group."""
    on_device = (view.records["flags"] & Flag.DEVICE_CLOCK) != 0
    spans = view.records[rec.is_kind(view.records["kind"], REPLICA_KINDS) & on_device]
    index = rec.comm_index(view.comms)
    found = collectives_of(spans, index)
    totals: dict[tuple[int, ...], float] = {}
    if not len(found):
        return totals
    shortest = np.minimum.reduceat(rec.durations_s(spans)[found.record], found.begin[:-1])
    incomplete = set(found.comm[~found.complete].tolist())
    for comm, seconds in zip(found.comm.tolist(), shortest.tolist(), strict=True):
        members = index.members[comm].members
        if comm not in incomplete and len(members) > 1:
            totals[members] = totals.get(members, 0.0) + seconds
    return totals
