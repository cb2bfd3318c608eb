"""Steps that have left the memory of the hub, read back from the disk: bounded in bytes, time and waiting requests."""

import asyncio
import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import cachetools
import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.archive.rows import ROW, Rows, rank_records
from megatronapp_analyzer.hub.archive.spooled_ingest import SpooledIngest
from megatronapp_analyzer.hub.archive.stored import StoredTraces
from megatronapp_analyzer.hub.archive.values import RowFilter
from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest
from megatronapp_analyzer.hub.ingest.ingest import AttemptState, TraceIngest, step_interval
from megatronapp_analyzer.hub.ingest.store import StepKey, StoredStep
from megatronapp_analyzer.model import Communicator, StepRecords, select_rows
from megatronapp_common.trace import RecordKind

READ_BYTES = 128 << 20
"""Bytes of the rows of an answer, 2.4 million spans: a step of some 6,000 ranks. Reading takes four times as many."""
READ_S = 10.0
"""Seconds that reading may take."""
CACHED_BYTES = 128 << 20
"""Memory of steps that were read last, which a page asks for again as it is zoomed; one is always cached."""
MAX_WAITING = 8
Clock = Callable[[], float]


class StepsRead(NamedTuple):
    """Steps from the disk, oldest first; `omitted` says what is missing and why, None if nothing is."""

    steps: list[StoredStep]
    omitted: str | None
    is_late: bool = False
    """True if reading was stopped for its time: read again, there may be more."""


class BusyError(Exception):
    """More requests wait for steps from the disk than may, or the disk is too slow."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadLimits:
    """Limits of an answer."""

    bytes: int = READ_BYTES
    seconds: float = READ_S


class StepHistory:
    """Reader of stored steps with a thread, which reads for one request at a time."""

    def __init__(
        self,
        ingest: TraceIngest,
        spooled: SpooledIngest,
        limits: ReadLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._ingest = ingest
        self._spooled = spooled
        self._limits = limits or ReadLimits()
        self._clock = clock
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="history")
        self._waiting = 0
        self._cache: cachetools.LRUCache[StepKey, StepsRead] = cachetools.LRUCache(math.inf, _size)
        """Limited by `_keep`, which also stores one step that is larger than the limit."""

    def close(self) -> None:
        """End the thread after what it reads now."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def find(self, step: int, attempt: int | None) -> StepsRead | None:
        """Return a step of an attempt, or of the newest that has it; None if it is not stored. Raises BusyError."""
        attempts = sorted(self._ingest.attempts, reverse=True) if attempt is None else [attempt]
        for number in attempts:
            if (known := self._cache.get((number, step))) is not None:
                return known
            found = await self._read(number, step, step, self._limits)
            if found.is_late and not found.steps:
                raise BusyError(f"step {step} was not found in {self._limits.seconds:g} s of reading")
            if found.steps:
                if not found.is_late:
                    self._keep((number, step), found)
                return found
        return None

    async def select(self, attempt: int, first: int, last: int, limits: ReadLimits) -> StepsRead:
        """Return the stored steps of a range, the oldest first where they are too many. Raises BusyError."""
        return await self._read(attempt, first, last, limits)

    async def _read(self, attempt: int, first: int, last: int, limits: ReadLimits) -> StepsRead:
        state = self._ingest.attempts.get(attempt)
        newest = next(iter(self._ingest.store.recent(1)), None)
        if newest is not None and newest.attempt == attempt:
            last = min(last, newest.step)  # ranks may not have delivered all of the steps after it
        if state is None or not state.rings or self._spooled.catalog is None or first > last:
            return StepsRead([], None)
        if self._waiting > MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} requests for stored steps wait already")
        self._waiting += 1
        try:
            digests = [digest for digest in self._ingest.store.digests(first, last) if digest.attempt == attempt]
            of_attempt = _Tables.of(state, {digest.step: digest for digest in digests})
            read = _Reading(of_attempt, limits, self._clock)
            stored, loop = self._spooled.stored, asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, read.steps, stored, (first, last))
        finally:
            self._waiting -= 1

    def _keep(self, key: StepKey, found: StepsRead) -> None:
        self._cache[key] = found
        while len(self._cache) > 1 and self._cache.currsize > CACHED_BYTES:
            self._cache.popitem()


def _size(found: StepsRead) -> int:
    return sum(step.view.records.nbytes for step in found.steps)


class _Tables(NamedTuple):
    """Tables of an attempt that reading its steps needs; nothing changes them."""

    attempt: int
    world: int
    comms: Mapping[int, Mapping[int, Communicator]]
    boot_ids: Mapping[int, str]
    own_offsets_ns: NDArray[np.int64]
    digests: Mapping[int, StepDigest]

    @classmethod
    def of(cls, state: AttemptState, digests: Mapping[int, StepDigest]) -> "_Tables":
        comms, boot_ids = state.tables()
        return cls(state.attempt, state.world, comms, boot_ids, state.own_offsets(), digests)


class _Reading:
    """One reading, within the limits of an answer, in a thread."""

    def __init__(self, tables: _Tables, limits: ReadLimits, clock: Clock) -> None:
        self._tables = tables
        self._limits = limits
        self._clock = clock
        self._end_s = clock() + limits.seconds

    def steps(self, stored: StoredTraces, steps: tuple[int, int]) -> StepsRead:
        """Return the stored steps of a range; of a range that was too large without the last one, which is in part."""
        parts, omitted, is_late = [np.zeros(0, ROW)], None, False
        left = self._limits.bytes
        for part in stored.rows(self._tables.attempt, RowFilter(steps=steps)):
            parts.append(part[: left // ROW.itemsize])
            left -= part.nbytes
            if left < 0:
                omitted = f"it has the first {self._limits.bytes >> 20} MiB of what is stored"
            elif self._clock() > self._end_s:
                omitted, is_late = f"reading was stopped after {self._limits.seconds:g} s", True
            if omitted is not None:
                break
        found = [self._step(rows) for rows in _by_step(np.concatenate(parts))]
        return StepsRead(found[:-1] if omitted is not None and len(found) > 1 else found, omitted, is_late)

    def _step(self, rows: Rows) -> StoredStep:
        """Return a step as the hub had it in memory; without its digest, it is complete if all ranks have ended it."""
        tables, records = self._tables, rank_records(rows)
        number = int(records["step"][0])
        offsets = tables.own_offsets_ns.copy()
        known = records["rank"] < tables.world
        offsets[records["rank"][known]] = rows["offset_ns"][known]
        start, duration = step_interval(select_rows(records, known), offsets)
        view = StepRecords(
            attempt=tables.attempt,
            step=number,
            records=select_rows(records, known),
            comms=tables.comms,
            boot_ids=tables.boot_ids,
            real_time_s=(start + duration) * 1e-9,
        )
        digest = tables.digests.get(number) or StepDigest(
            attempt=tables.attempt,
            step=number,
            start_real_ns=start,
            duration_ns=duration,
            complete=len(np.unique(records["rank"][records["kind"] == RecordKind.STEP])) == tables.world,
            values=np.full((len(METRICS), tables.world), math.nan, np.float32),
        )
        return StoredStep(view=view, digest=digest, offsets_ns=offsets)


def _by_step(rows: Rows) -> Iterator[Rows]:
    """Yield the rows of each step, by rank and start."""
    if not len(rows):
        return
    rows = select_rows(rows, np.lexsort((rows["start_ns"], rows["rank"], rows["step"])))
    begins = np.flatnonzero(np.diff(rows["step"].astype(np.int64), prepend=-1))
    for begin, end in zip(begins.tolist(), np.append(begins[1:], len(rows)).tolist(), strict=True):
        yield rows[begin:end]
