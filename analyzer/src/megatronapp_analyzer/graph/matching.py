"""Matching of the records that several ranks write about one event: messages and collectives.

Keys are exact (communicator members and ordinal), so neither clocks nor hashes are needed. A lost record leaves its
partner unmatched; it never shifts the matching of others.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.records import GROUP_KINDS, CommIndex, bytes_of, is_kind
from megatronapp_analyzer.model import Communicator, RankRecords, select_rows
from megatronapp_common.trace import RecordKind
from megatronapp_native import match_messages as native_match_messages

Index = NDArray[np.int64]
_ORDINAL_BITS = 32
_KIND_BITS = 8
MEETING_KINDS = frozenset({RecordKind.DATA, RecordKind.FORWARD, RecordKind.BACKWARD})
_PARTS = (RecordKind.SEND_POST, RecordKind.SEND_WAIT, RecordKind.RECV_POST, RecordKind.RECV_WAIT)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Messages, a row each. The four index arrays point into the records they were matched in; -1 where missing."""

    source: Index
    destination: Index
    ordinal: Index
    send_post: Index
    send_wait: Index
    recv_post: Index
    recv_wait: Index

    def __len__(self) -> int:
        return len(self.source)

    @property
    def matched(self) -> NDArray[np.bool_]:
        """Mask of messages of which both the post of the send and the end of the receive are known."""
        both: NDArray[np.bool_] = (self.send_post >= 0) & (self.recv_wait >= 0)
        return both

    def matched_only(self) -> "Messages":
        """Return the messages of which both of these are known."""
        both = self.matched
        if both.all():
            return self
        return Messages(**{field.name: getattr(self, field.name)[both] for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """Instances of collectives: members of instance i are `record[begin[i]:begin[i + 1]]`, indices into the records."""

    comm: Index
    kind: Index
    begin: Index
    record: Index
    expected: Index
    """Number of members each instance should have."""

    def __len__(self) -> int:
        return len(self.comm)

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Mask of instances with a record of every member."""
        whole: NDArray[np.bool_] = np.diff(self.begin) == self.expected
        return whole


def match_messages(records: RankRecords, comms: Mapping[int, Mapping[int, Communicator]]) -> Messages:
    """Match the messages of one step. `records` hold that step only, in any order."""
    return messages_of(records, CommIndex(comms))


def messages_of(records: RankRecords, index: CommIndex) -> Messages:
    """Match messages as `match_messages`, with the communicators already numbered; in C++."""
    source, destination, ordinal, *parts = native_match_messages(
        bytes_of(records), index.lookup, index.pairs, [int(part) for part in _PARTS]
    )
    return Messages(
        source=source,
        destination=destination,
        ordinal=ordinal,
        send_post=parts[0],
        send_wait=parts[1],
        recv_post=parts[2],
        recv_wait=parts[3],
    )


def collectives_of(records: RankRecords, index: CommIndex) -> Collectives:
    """Match the collectives of one step that are entries of the ranks' streams, by the tables of the ranks."""
    where = np.flatnonzero(is_kind(records["kind"], GROUP_KINDS))
    chosen = select_rows(records, where)
    return _grouped(chosen, where, index.numbers(chosen), index)


def step_collectives_of(spans: RankRecords, ranks: Index, index: CommIndex) -> Collectives:
    """Match collectives as `collectives_of`, but a reduction of the loss as what it is: all ranks of a role meet in it.

    `spans` are those of a whole step, sorted by rank, and `ranks` their ranks. Where a rank of a role has spans and no
    reduction, a record is missing: then the tables, which list parts of the role, say who met.
    """
    where = np.flatnonzero(is_kind(spans["kind"], GROUP_KINDS))
    chosen = select_rows(spans, where)
    numbers = index.numbers(chosen)
    losses = np.flatnonzero(chosen["kind"] == RecordKind.LOSS_REDUCE)
    if not len(losses):
        return _grouped(chosen, where, numbers, index)
    worlds = index.worlds(chosen["rank"][losses].astype(np.int64))
    present = np.bincount(index.worlds(_distinct(ranks)) + 1, minlength=len(index.sizes) + 1)[1:]
    is_whole = _are_whole(worlds, chosen["ordinal"][losses], present)
    whole = is_whole[worlds] & (worlds >= 0)
    numbers[losses[whole]] = worlds[whole]
    found = _grouped(chosen, where, numbers, index)
    met = (found.kind == RecordKind.LOSS_REDUCE) & is_whole[found.comm]
    return dataclasses.replace(found, expected=np.where(met, present[found.comm], found.expected))


def _distinct(sorted_ranks: Index) -> Index:
    if not len(sorted_ranks):
        return sorted_ranks
    begin = np.searchsorted(sorted_ranks, np.arange(sorted_ranks[-1] + 2))
    return np.flatnonzero(np.diff(begin))


def _are_whole(worlds: Index, ordinals: NDArray[np.uint32], present: Index) -> NDArray[np.bool_]:
    """Return for each communicator whether each of its reductions, of which there are some, has all present ranks."""
    known = worlds >= 0
    keys, count = np.unique((worlds[known] << _ORDINAL_BITS) | ordinals[known].astype(np.int64), return_counts=True)
    of_key = keys >> _ORDINAL_BITS
    whole = np.zeros(len(present), np.bool_)
    whole[of_key] = True
    whole[of_key[count != present[of_key]]] = False
    return whole


def _grouped(chosen: RankRecords, where: Index, numbers: Index, index: CommIndex) -> Collectives:
    """Return the instances of collectives: `chosen` are rows `where`, with the numbers of their communicators."""
    kinds, ordinals = chosen["kind"].astype(np.int64), chosen["ordinal"].astype(np.int64)
    known = numbers >= 0
    where = where[known]
    key = ((((numbers << _KIND_BITS) | kinds) << _ORDINAL_BITS) | ordinals)[known]
    order = np.argsort(key, kind="stable")
    keys, begin = np.unique(key[order], return_index=True)
    comm = keys >> (_ORDINAL_BITS + _KIND_BITS)
    return Collectives(
        comm=comm,
        kind=(keys >> _ORDINAL_BITS) & ((1 << _KIND_BITS) - 1),
        begin=np.append(begin, len(where)).astype(np.int64),
        record=where[order],
        expected=index.sizes[comm],
    )


def meetings_of(records: RankRecords, unit_of_rank: Index) -> Collectives:
    """Match spans inside which the ranks of a unit meet (tensor parallelism), as if each were one collective.

    They meet in passes, and in DATA, where one of them hands the batch to the others. `comm` is the unit. Units of one
    rank have no meetings.
    """
    size = np.bincount(unit_of_rank)
    where = np.flatnonzero(is_kind(records["kind"], MEETING_KINDS))
    spans = select_rows(records, where)
    unit = unit_of_rank[spans["rank"]]
    shared = size[unit] > 1
    if not shared.all():
        where, spans, unit = where[shared], select_rows(spans, shared), unit[shared]
    work = (spans["kind"].astype(np.int64) << 32) | (spans["chunk"].astype(np.int64) << 16)
    key = (unit << 40) | work | spans["microbatch"]
    order = np.argsort(key, kind="stable")
    keys, begin = np.unique(key[order], return_index=True)
    return Collectives(
        comm=keys >> 40,
        kind=(keys >> 32) & 0xFF,
        begin=np.append(begin, len(where)).astype(np.int64),
        record=where[order],
        expected=size[keys >> 40],
    )


def handovers_of(spans: RankRecords, meetings: Collectives, end_s: NDArray[np.float64]) -> tuple[Index, Index]:
    """Return pairs of spans: a DATA that ends last in its unit, and what another member begins next after its own.

    The other member has queued the copy that it gets, and begins when the reader has handed it over.
    """
    instance = np.repeat(np.arange(len(meetings)), np.diff(meetings.begin))
    chosen = (meetings.kind == RecordKind.DATA)[instance]
    member, instance = meetings.record[chosen], instance[chosen]
    order = np.lexsort((end_s[member], instance))
    member, instance = member[order], instance[order]
    final = np.flatnonzero(np.diff(instance, append=-1))
    last = np.repeat(member[final], np.diff(final, prepend=-1))
    following = np.minimum(member + 1, len(spans) - 1)
    waits = (last != member) & (following > member) & (spans["rank"][following] == spans["rank"][member])
    return last[waits], following[waits]
