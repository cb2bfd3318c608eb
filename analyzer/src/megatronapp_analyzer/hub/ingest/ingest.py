"""Finished steps, curves and counters from RING and RECORDS frames. No sockets, files or clock."""

import dataclasses
import logging
import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.align.step_clocks import VALID_STEPS, AttemptClocks, ClockReading, has_nodes
from megatronapp_analyzer.errors import LayoutError, ProtocolError
from megatronapp_analyzer.hub.ingest.assembly import AssembledStep, FrameSummary, StepAssembler
from megatronapp_analyzer.hub.ingest.counter_history import CounterHistory
from megatronapp_analyzer.hub.ingest.curves import CurvePoint, Curves, points_of
from megatronapp_analyzer.hub.ingest.digest import StepDigest, StepDigester, durations_ns, is_kind
from megatronapp_analyzer.hub.ingest.ring_metadata import RankRing, build_layout, device_count, parse_ring
from megatronapp_analyzer.hub.ingest.store import MemoryStepStore, StepKey, StepStore, StoredStep, StoreLimits
from megatronapp_analyzer.hub.ingest.thinning_list import ThinningList
from megatronapp_analyzer.model import Communicator, JobLayout, RankRecords, StepRecords, select_rows
from megatronapp_common.trace import RECORD, RECORD_BYTES, RecordKind

LOG = logging.getLogger(__name__)
COUNTER_SAMPLES = 20_000
USUAL_STEPS = 16
RingKey = tuple[int, int | None]
"""Key (worker, rank) of a ring; rank None is the worker's own ring."""


@dataclasses.dataclass(frozen=True, slots=True)
class CounterSample:
    """One sample of a host or device counter of a worker; `start_ns` is on its monotonic clock."""

    worker: int
    counter: int
    device: int
    start_ns: int
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IngestResult:
    """New records, steps and curve points of one RECORDS frame."""

    finished: list[StoredStep]
    points: list[CurvePoint]
    records: int
    """Number of records that were new."""


class AttemptState:
    """Rings and unfinished steps of one attempt."""

    def __init__(self, attempt: int, *, aligns: bool) -> None:
        """Begin an attempt. `aligns`: estimate the clocks here, without readings of the caller."""
        self.attempt = attempt
        self._aligns = aligns
        self.rings: dict[int, RankRing] = {}
        self.layout: JobLayout | None = None
        self.next_index: dict[RingKey, int] = {}
        self.lost: dict[RingKey, int] = {}
        self.assembler: StepAssembler | None = None
        self._laid_out = 0
        """Number of rings that `layout` was made from."""
        self._digester: StepDigester | None = None
        self._clocks: AttemptClocks | None = None
        self._reading: ClockReading | None = None
        self._tables: tuple[Mapping[int, Mapping[int, Communicator]], Mapping[int, str]] | None = None
        self._devices: int | None = None
        self._first_boot_id: str | None = None
        """Clock of the first worker's node; None until it is needed after a report of a ring."""
        self.clock_uncertainty_s: dict[int, float] = {}
        """Newest uncertainty of each rank's clock against the first rank's; infinite where no message ties them."""

    @property
    def world(self) -> int:
        """Return the number of ranks; 0 before the first ring."""
        return next(iter(self.rings.values())).world if self.rings else 0

    @property
    def devices(self) -> int:
        """Return the number of GPUs that the ranks use, or of ranks where none uses a GPU; 0 before the first ring."""
        if self._devices is None:  # counted once: a list of verdicts asks for each
            self._devices = device_count(self.rings)
        return self._devices

    def add_ring(self, ring: RankRing) -> None:
        """Take the metadata of a ring. Raises ProtocolError if it contradicts the others, LayoutError likewise."""
        if self.rings and ring.world != self.world:
            raise ProtocolError("bad-ring", f"rank {ring.rank} says a world of {ring.world}, others {self.world}")
        self.rings[ring.rank] = ring
        self._tables = self._first_boot_id = self._devices = None
        if self.assembler is None:
            self.assembler = StepAssembler(self.attempt, ring.world, ring.total_iterations)
            self._digester = StepDigester(ring.world, None)
        if len(self.rings) == ring.world:
            self._lay_out()

    @property
    def missing(self) -> list[int]:
        """Return ranks without which steps are judged, because they have not reported for long."""
        return sorted(self.assembler.absent) if self.assembler else []

    def _lay_out(self) -> None:
        """Make the layout of the rings that are known, if more are known than before. Raises LayoutError."""
        if len(self.rings) == self._laid_out:
            return
        self._laid_out = len(self.rings)
        if (layout := build_layout(self.rings, partial=True)) is not None:
            self.layout = layout
            self._digester = StepDigester(layout.world, layout)
            self._clocks = AttemptClocks(layout) if self._aligns else None

    def _lay_out_partly(self) -> None:
        """Make a layout as `_lay_out` does; rings that do not fit leave the layout unchanged.

        The agent that sends the step is not to blame for the rings, and the step has left the assembler already.
        """
        try:
            self._lay_out()
        except LayoutError as error:
            LOG.warning("rings of attempt %d do not fit; its layout is unchanged: %s", self.attempt, error)

    def store_form(self, step: AssembledStep) -> StoredStep:
        """Return an assembled step with the tables that reading it needs."""
        if self.missing:
            self._lay_out_partly()
        assert self._digester is not None
        comms, boot_ids = self.tables()
        view = StepRecords(
            attempt=step.attempt,
            step=step.step,
            records=step.records,
            comms=comms,
            boot_ids=boot_ids,
            lost=step.lost,
        )
        offsets, aligned = self._offsets(view)
        start, duration = step_interval(step.records, offsets)
        view = dataclasses.replace(view, real_time_s=(start + duration) * 1e-9)
        digest = StepDigest(
            attempt=step.attempt,
            step=step.step,
            start_real_ns=start,
            duration_ns=duration,
            complete=step.complete,
            values=self._digester.values(step.records),
        )
        return StoredStep(view=view, digest=digest, offsets_ns=offsets, aligned=aligned)

    def tables(self) -> tuple[Mapping[int, Mapping[int, Communicator]], Mapping[int, str]]:
        """Return communicators and clocks of all ranks: the same objects for all steps between two reports of rings."""
        if self._tables is None:
            known = self.rings[min(self.rings)]
            comms = {rank: ring.comms for rank, ring in self.rings.items()}
            self._tables = comms, {rank: self.rings.get(rank, known).boot_id for rank in range(self.world)}
        return self._tables

    def clock_doubt_s(self, rank: int) -> float:
        """Return what times of a rank with a ring may be wrong by against the first worker's: infinite where unknown.

        Ranks of the first worker's node have its clock.
        """
        known = self.clock_uncertainty_s.get(rank)
        if known is not None:
            return known
        if self._first_boot_id is None:  # found once: this method is called for each of many ranks
            first = min(self.rings.values(), key=lambda ring: (ring.worker, ring.rank))
            self._first_boot_id = first.boot_id
        return 0.0 if self.rings[rank].boot_id == self._first_boot_id else math.inf

    def take_reading(self, reading: ClockReading) -> NDArray[np.int64] | None:
        """Take the clocks at a step; return its offsets, None if the reading is of another number of ranks."""
        if len(reading.tied) != self.world:
            return None
        self._reading = reading
        self.clock_uncertainty_s = dict(enumerate(reading.uncertainty_s.tolist()))
        return reading.real_offsets_ns(self.own_offsets())

    def forget_reading(self) -> None:
        """Forget the clocks, because their source is lost: they are unknown until the next reading."""
        self._reading = None
        self.clock_uncertainty_s = {}

    def own_offsets(self) -> NDArray[np.int64]:
        """Return real time minus each rank's clock, by the real clock of its node."""
        known = self.rings[min(self.rings)]
        return np.array([self.rings.get(rank, known).real_offset_ns for rank in range(self.world)], np.int64)

    def _offsets(self, view: StepRecords) -> tuple[NDArray[np.int64], bool]:
        """Return real time minus each rank's clock, and whether these are the clocks at this very step."""
        if self._clocks is not None and (reading := self._clocks.observe(view)) is not None:
            offsets = self.take_reading(reading)
            return (self.own_offsets(), True) if offsets is None else (offsets, True)
        if self._aligns or not has_nodes(view):
            return self.own_offsets(), True
        newest = self._reading
        if newest is None or abs(view.step - newest.step) > VALID_STEPS:
            return self.own_offsets(), False
        return newest.real_offsets_ns(self.own_offsets()), False


def step_interval(records: RankRecords, offsets_ns: NDArray[np.int64]) -> tuple[int, int]:
    """Return the real time of a step's start and its length, from its STEP spans, or from all spans if it has none."""
    own = select_rows(records, is_kind(records, (RecordKind.STEP,)))
    rows = own if len(own) else records
    starts = rows["start_ns"].astype(np.int64) + offsets_ns[rows["rank"]]
    lengths = durations_ns(rows)
    if len(own):
        return int(starts.min()), int(lengths.max())
    return int(starts.min()), int((starts + lengths).max() - starts.min())


def read_body(body: bytes | memoryview) -> NDArray[np.void]:
    """Return the records of a RECORDS frame. Raises ProtocolError if the body is not whole records."""
    if len(body) % RECORD_BYTES:
        raise ProtocolError("bad-records", f"RECORDS frame of {len(body)} bytes is not whole records")
    return np.frombuffer(body, RECORD)


class TraceIngest:
    """All attempts of the job, the store of their steps, and the curves."""

    def __init__(
        self, limits: StoreLimits, *, aligns: bool = True, counter_history: CounterHistory | None = None
    ) -> None:
        """Begin without any attempt. `aligns`: estimate clocks here; if false, the caller gives readings."""
        self._aligns = aligns
        self.store: StepStore = MemoryStepStore(limits)
        self.curves = Curves()
        self.counters: ThinningList[CounterSample] = ThinningList(COUNTER_SAMPLES)
        self.counter_history = counter_history or CounterHistory()
        self.attempts: dict[int, AttemptState] = {}
        self._known_steps: set[StepKey] = set()
        self._oldest_known: dict[int, int] = {}
        self._known_points: set[tuple[str, int, int]] = set()

    @property
    def newest(self) -> AttemptState | None:
        """Return the newest attempt that has a ring."""
        begun = [attempt for attempt, state in self.attempts.items() if state.rings]
        return self.attempts[max(begun)] if begun else None

    def newest_step(self) -> int | None:
        """Return the newest finished step of the newest attempt; None before its first."""
        attempt, recent = self.newest, self.store.recent(1)
        return recent[0].step if attempt is not None and recent and recent[0].attempt == attempt.attempt else None

    def usual_step_s(self) -> float | None:
        """Return the median length of the newest steps."""
        recent = self.store.recent(USUAL_STEPS)
        return statistics.median(digest.duration_ns for digest in recent) * 1e-9 if recent else None

    def lost_by_worker(self) -> dict[int, int]:
        """Return the number of records that rings or agents lost, over all attempts."""
        lost: dict[int, int] = {}
        for state in self.attempts.values():
            for (worker, _), count in state.lost.items():
                lost[worker] = lost.get(worker, 0) + count
        return lost

    def add_ring(self, attempt: int, header: Mapping[str, Any]) -> list[StoredStep]:
        """Take a RING frame. Returns the unfinished steps of older attempts, which end here."""
        if header.get("rank") is None:
            return []
        ring = parse_ring(attempt, header)
        state = self._state_of(attempt)
        is_new = not state.rings
        state.add_ring(ring)
        return self._end_older(attempt) if is_new else []

    def add_records(self, attempt: int, header: Mapping[str, Any], body: bytes | memoryview) -> IngestResult:
        """Take a RECORDS frame; records that were received before are skipped. Raises ProtocolError."""
        records, lost = self._new_records(attempt, header, body)
        if header.get("rank") is None:
            self._add_counters(attempt, int(header["worker"]), records)
            return IngestResult(finished=[], points=[], records=len(records))
        rank = int(header["rank"])
        state = self.attempts.get(attempt)
        if state is None or state.assembler is None or rank not in state.rings:
            raise ProtocolError("no-ring", f"RECORDS of rank {rank} before its RING", "Send RING first.")
        points: list[CurvePoint] = []
        spans = records
        found = FrameSummary.of(records) if len(records) else None
        if found is not None and found.has_samples:
            points = [point for point in points_of(attempt, rank, records) if point.key not in self._known_points]
            for point in points:
                self.curves.add(point)
            spans, found = records[records["kind"] < RecordKind.METRIC], None
        assembled, late = state.assembler.add(rank, spans, lost=lost, found=found)
        for step, rows in late:
            self.store.add_late(attempt, step, rows)
        return IngestResult(finished=self._keep(state, assembled), points=points, records=len(records))

    def take_reading(self, reading: ClockReading) -> NDArray[np.int64] | None:
        """Take the clocks at a step; if this is stored in full, its times change to them.

        Returns real time minus the clock of each rank; None for an attempt or number of ranks that is not known.
        """
        state = self.attempts.get(reading.attempt)
        if state is None or (offsets := state.take_reading(reading)) is None:
            return None
        self.store.align(reading.key, offsets)
        return offsets

    def skip_below(self, attempt: int, indices: Mapping[RingKey, int]) -> None:
        """Skip records of rings below these indices, because they are stored already."""
        state = self._state_of(attempt)
        for key, index in indices.items():
            state.next_index[key] = max(index, state.next_index.get(key, 0))

    def forget_readings(self) -> None:
        """Forget the clocks of all attempts, because their source is lost."""
        for state in self.attempts.values():
            state.forget_reading()

    def begin_replay(self, steps: set[StepKey]) -> None:
        """Expect stored records: `steps` have their digests and present points are not added twice."""
        self._known_steps = steps
        self._oldest_known = dict(sorted(steps, reverse=True))
        self._known_points = {point.key for point in self.curves.points()}

    def end_replay(self) -> None:
        """Expect new records again."""
        self._known_steps, self._known_points = set(), set()
        self._oldest_known = {}

    def end_attempt(self, attempt: int) -> list[StoredStep]:
        """Finish what is left of an attempt, as incomplete steps."""
        state = self.attempts.get(attempt)
        if state is None or state.assembler is None:
            return []
        return self._keep(state, state.assembler.flush())

    def _state_of(self, attempt: int) -> AttemptState:
        if attempt not in self.attempts:
            self.attempts[attempt] = AttemptState(attempt, aligns=self._aligns)
        return self.attempts[attempt]

    def _end_older(self, attempt: int) -> list[StoredStep]:
        return [step for older in sorted(self.attempts) if older < attempt for step in self.end_attempt(older)]

    def _keep(self, state: AttemptState, assembled: list[AssembledStep]) -> list[StoredStep]:
        finished = [state.store_form(step) for step in assembled]
        for step in finished:
            # Digests are in the order of the steps: one that was deleted is not added after newer ones.
            is_new = step.key not in self._known_steps and step.view.step > self._oldest_known.get(state.attempt, -1)
            self.store.add(step, with_digest=is_new)
        return finished

    def _new_records(
        self, attempt: int, header: Mapping[str, Any], body: bytes | memoryview
    ) -> tuple[NDArray[np.void], int]:
        try:
            rank, worker, first, lost = header["rank"], int(header["worker"]), int(header["first"]), int(header["lost"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("bad-records", f"RECORDS frame: {type(error).__name__}: {error}") from error
        records = read_body(body)
        state = self._state_of(attempt)
        key = (worker, rank)
        known = state.next_index.get(key)
        skip = min(max((known or 0) - first, 0), len(records))
        if skip == len(records):
            return records[:0], 0
        # A gap after what is known was lost in the ring or dropped by the agent; `lost` says it only of the ring.
        gap = lost if known is None else max(0, first - known)
        state.next_index[key] = first + len(records)
        state.lost[key] = state.lost.get(key, 0) + gap
        return records[skip:], gap

    def _add_counters(self, attempt: int, worker: int, records: NDArray[np.void]) -> None:
        self.counter_history.add(attempt, worker, records)
        samples = records[records["kind"] == RecordKind.COUNTER]
        values = samples["aux"].astype("<u4").view("<f4")
        for row, value in zip(samples, values, strict=True):
            sample = CounterSample(worker, int(row["comm"]), int(row["ordinal"]), int(row["start_ns"]), float(value))
            self.counters.append(sample)
