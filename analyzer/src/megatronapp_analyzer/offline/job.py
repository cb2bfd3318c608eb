"""A recorded job in our own form: for each rank its place, its communicators and its records."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import ImportTraceError
from megatronapp_analyzer.model import Communicator
from megatronapp_common.topology import Coordinates
from megatronapp_common.trace import (
    BYTES_UNIT,
    DURATION_UNIT_NS,
    MAX_DURATION_UNITS,
    NO_COMM,
    NO_MICROBATCH,
    RECORD,
    Flag,
    RecordKind,
)

_SEND, _RECEIVE = (RecordKind.SEND_POST, RecordKind.SEND_WAIT), (RecordKind.RECV_POST, RecordKind.RECV_WAIT)
_MOST_PER_FILE = 16
"""Ranks of a job for each that is recorded."""
_MOST_NS, _MOST_STEPS = 1 << 61, 1 << 31
Row = tuple[int, int, int, int, int, int, int, int, int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Details:
    """Content of a record besides kind and time."""

    microbatch: int | None = None
    chunk: int = 0
    size_bytes: int | None = None
    run_queue_ns: int | None = None
    lead_ns: int | None = None
    """Lead of the host when the device ended the span."""
    ordinal: int = 0
    """Number of a message or collective in its communicator and step, if it is known."""
    on_device: bool = False
    flags: int = 0
    """Further bits of Flag or PassFlag."""

    @property
    def aux(self) -> tuple[int, Flag]:
        """Return the number that the record has room for, and the flag that says which it is."""
        if self.size_bytes is not None:
            return self.size_bytes // BYTES_UNIT, Flag.AUX_BYTES
        if self.run_queue_ns is not None:
            return self.run_queue_ns // DURATION_UNIT_NS, Flag.AUX_RUN_QUEUE
        if self.lead_ns is not None:
            return self.lead_ns // DURATION_UNIT_NS, Flag.AUX_LEAD
        return 0, Flag(0)


_NO_DETAILS = Details()


class RankRecords:
    """Builder of the records of one rank. Numbers of messages and collectives follow from the order of the calls."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.communicators: dict[Communicator, int] = {}
        self._rows: list[Row] = []
        self._ordinals: Counter[tuple[int, int, int]] = Counter()

    def add(self, kind: RecordKind, step: int, times_ns: tuple[int, int], details: Details = _NO_DETAILS) -> None:
        """Add a span from start to end."""
        self._append(kind, step, times_ns, (NO_COMM, 0), details)

    def collective(
        self,
        kind: RecordKind,
        step: int,
        times_ns: tuple[int, int],
        group: Communicator,
        details: Details = _NO_DETAILS,
    ) -> None:
        """Add a span of a collective of a group."""
        slot = self._slot(group)
        self._append(kind, step, times_ns, (slot, self._next(slot, kind, step)), details)

    def send(self, step: int, times_ns: tuple[int, int], receiver: int, details: Details = _NO_DETAILS) -> None:
        """Add a message of this rank: its post at the start, and the wait up to the end."""
        self._message(_SEND, step, times_ns, (self.rank, receiver), details)

    def receive(self, step: int, times_ns: tuple[int, int], sender: int, details: Details = _NO_DETAILS) -> None:
        """Add a message to this rank: its post at the start, and the wait up to the end."""
        self._message(_RECEIVE, step, times_ns, (sender, self.rank), details)

    def numbered(
        self, kind: RecordKind, step: int, times_ns: tuple[int, int], group: Communicator, details: Details
    ) -> None:
        """Add a span of a message or collective whose number, `details.ordinal`, is known."""
        self._append(kind, step, times_ns, (self._slot(group), details.ordinal), details)

    def array(self) -> NDArray[np.void]:
        """Return all records, sorted by step, then end, with a step after all that it encloses."""
        rows = np.array(self._rows, RECORD) if self._rows else np.zeros(0, RECORD)
        ends = rows["start_ns"] + rows["duration"].astype(np.uint64) * np.uint64(DURATION_UNIT_NS)
        ordered: NDArray[np.void] = rows[np.lexsort((ends, rows["kind"] == RecordKind.STEP, rows["step"]))]
        return ordered

    def _message(
        self,
        kinds: tuple[RecordKind, RecordKind],
        step: int,
        times_ns: tuple[int, int],
        pair: tuple[int, int],
        details: Details,
    ) -> None:
        slot = self._slot(Communicator("p2p", pair))
        key = slot, self._next(slot, kinds[0], step)
        self._append(kinds[0], step, (times_ns[0], times_ns[0]), key, details)
        self._append(kinds[1], step, times_ns, key, details)

    def _slot(self, communicator: Communicator) -> int:
        return self.communicators.setdefault(communicator, len(self.communicators))

    def _next(self, slot: int, kind: int, step: int) -> int:
        self._ordinals[slot, kind, step] += 1
        return self._ordinals[slot, kind, step] - 1

    def _append(self, kind: int, step: int, times_ns: tuple[int, int], key: tuple[int, int], details: Details) -> None:
        if not 0 <= times_ns[0] <= _MOST_NS or not 0 <= step <= _MOST_STEPS:
            raise ValueError(f"a span begins at {times_ns[0]} ns in step {step}")
        units = max(0, times_ns[1] - times_ns[0]) // DURATION_UNIT_NS
        aux, flags = details.aux
        flags |= Flag(details.flags)
        flags |= Flag.DEVICE_CLOCK if details.on_device else Flag(0)
        flags |= Flag.SATURATED if units > MAX_DURATION_UNITS else Flag(0)
        batch = NO_MICROBATCH if details.microbatch is None else details.microbatch
        duration, aux = min(units, MAX_DURATION_UNITS), min(aux, MAX_DURATION_UNITS)
        self._rows.append(
            (times_ns[0], duration, step, key[1], aux, key[0], batch, int(kind), details.chunk, 0, int(flags))
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRank:
    """Place and records of a rank."""

    rank: int
    coordinates: Coordinates
    worker: int
    local_rank: int
    node: str
    device: str
    communicators: Sequence[Communicator]
    """By slot."""
    records: NDArray[np.void]
    """Sorted by step."""
    clock: str = "imported"
    """Name of the clock of its times; ranks with the same one need no alignment."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedJob:
    """Ranks of a job that another tool recorded."""

    source: str
    layout: dict[str, int]
    """Sizes `tensor`, `pipeline`, `data` and `virtualPipeline`."""
    world: int
    ranks: Sequence[RecordedRank]
    real_offset_ns: int = 0
    """Real time minus the clock of the records."""
    notes: Sequence[str] = ()
    """Remarks on what is not imported, and on what is assumed."""

    def ring_header(self, rank: RecordedRank) -> dict[str, Any]:
        """Return the metadata of a rank as an agent reports it."""
        at = rank.coordinates
        metadata = {
            "rank": rank.rank,
            "localRank": rank.local_rank,
            "worker": rank.worker,
            "node": rank.node,
            "world": self.world,
            "layout": self.layout,
            "coordinates": {"tp": at.tp, "cp": at.cp, "ep": at.ep, "dp": at.dp, "pp": at.pp},
            "comms": [
                {"slot": slot, "kind": comm.kind, "members": list(comm.members)}
                for slot, comm in enumerate(rank.communicators)
            ],
            "device": rank.device,
        }
        return {
            "rank": rank.rank,
            "worker": rank.worker,
            "metadata": metadata,
            "bootId": rank.clock,
            "clockPairs": [[0, self.real_offset_ns]],
            "capacity": max(1, len(rank.records)),
        }

    def parts(self) -> Iterator[tuple[dict[str, Any], NDArray[np.void]]]:
        """Yield header and records of each step of each rank, in the order in which ranks would have sent them."""
        sent = dict.fromkeys((rank.rank for rank in self.ranks), 0)
        by_step = [_by_step(rank.records) for rank in self.ranks]
        for step in sorted({step for steps in by_step for step in steps}):
            for rank, steps in zip(self.ranks, by_step, strict=True):
                part = steps.get(step)
                if part is not None:
                    header = {"rank": rank.rank, "worker": rank.worker, "first": sent[rank.rank], "lost": 0}
                    sent[rank.rank] += len(part)
                    yield header, part


def _by_step(records: NDArray[np.void]) -> dict[int, NDArray[np.void]]:
    """Return the part of each step of records that are sorted by step, without a copy."""
    steps, firsts = np.unique(records["step"], return_index=True)
    return dict(zip(steps.tolist(), np.split(records, firsts[1:]), strict=True)) if len(steps) else {}


def check_world(ranks: Iterable[int], world: int, source: str) -> list[str]:
    """Return a note about ranks that are missing. Raises ImportTraceError if most are, and for two of one number."""
    numbers = Counter(ranks)
    twice = [number for number, count in numbers.items() if count > 1]
    if twice:
        raise ImportTraceError(f"{source}: {numbers[twice[0]]} files are of rank {twice[0]}; give one of each rank")
    if world > _MOST_PER_FILE * len(numbers):
        raise ImportTraceError(
            f"{source}: {len(numbers)} of {world} ranks have a file; give those of all ranks, or of one in "
            f"{_MOST_PER_FILE} at least"
        )
    missing = [number for number in range(world) if number not in numbers]
    return [f"ranks {', '.join(map(str, missing[:8]))}{' ...' * (len(missing) > 8)} have no file"] if missing else []
