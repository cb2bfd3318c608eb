"""Conversion of time marks to records: the host recorder for the CPU, and what both recorders share."""

import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from megatronapp_common.trace import (
    BYTES_UNIT,
    DURATION_UNIT_NS,
    MAX_DURATION_UNITS,
    NO_COMM,
    NO_MICROBATCH,
    PAIRS_UNIT,
    TIMED_KINDS,
    Flag,
    Metric,
    RecordKind,
)
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy

# Plain integers: combining members of an IntFlag takes longer than all else that a record does.
AUX_RUN_QUEUE, AUX_BYTES, AUX_WORK = int(Flag.AUX_RUN_QUEUE), int(Flag.AUX_BYTES), int(Flag.AUX_WORK)
_FLOAT = struct.Struct("<f")
_UINT32 = struct.Struct("<I")


class TraceRing(Protocol):
    """Methods used of `megatronapp_native.RingWriter`."""

    def record(  # noqa: PLR0917 - the hot path takes positions only
        self,
        start_ns: int,
        duration_ns: int,
        step: int,
        ordinal: int,
        aux: int,
        comm: int,
        microbatch: int,
        kind: int,
        chunk: int,
        layer: int,
        flags: int,
        /,
    ) -> None:
        """Append one record; never blocks."""

    def open_span(self, kind: int, step: int, microbatch: int, start_ns: int, /) -> None:
        """Publish the span that this rank has entered."""

    def close_span(self) -> None:
        """Publish that this rank has left the span."""

    def heartbeat(self) -> None:
        """Store the present time as a sign of life."""

    def clock_pair(self) -> None:
        """Add a pair of monotonic and real time."""

    def close(self, unlink: bool, /) -> None:
        """Mark the ring as closed."""


class TimeMark(NamedTuple):
    """A moment: the host's monotonic time, this thread's run-queue delay so far, and on CUDA an event.

    `processor_ns` is the thread's processor time so far; None where no span needs it.
    """

    time_ns: int
    run_queue_ns: int
    event: Any = None
    processor_ns: int | None = None


class RecordKey(NamedTuple):
    """Key of a record besides its step."""

    kind: RecordKind
    microbatch: int = NO_MICROBATCH
    chunk: int = 0
    comm: int = NO_COMM
    ordinal: int = 0
    flags: int = 0
    layer: int = 0


def float_bits(value: float) -> int:
    """Return the bits of `value` as a 32-bit float; a magnitude beyond its range becomes infinite."""
    try:
        packed = _FLOAT.pack(value)
    except OverflowError:
        packed = _FLOAT.pack(float("inf") if value > 0 else float("-inf"))
    return int(_UINT32.unpack(packed)[0])


def duration_units(duration_ns: int) -> int:
    """Convert nanoseconds to units of the record, limited to 32 bits."""
    return min(max(duration_ns, 0) // DURATION_UNIT_NS, MAX_DURATION_UNITS)


class Recorder:
    """Writes spans at their end to the ring, measured by the host's monotonic clock.

    `on_length(kind, flags, own_ns)` is called for every span that `enter` and `leave` enclose; own_ns is its length
    without run-queue delay. The CUDA recorder overrides the spans of the compute stream; host spans are the same there.
    """

    def __init__(
        self,
        ring: TraceRing,
        *,
        monotonic_ns: Callable[[], int],
        run_queue_ns: Callable[[], int],
        on_length: Callable[[int, int, int], None],
        processor_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.ring = ring
        self.step = 0
        self._processor_ns = processor_ns
        self._now_ns = monotonic_ns
        self._run_queue_ns = run_queue_ns
        self._on_length = on_length

    def begin_step(self, step: int) -> None:
        """Assign later spans to `step`."""
        self.step = step
        self.ring.heartbeat()

    def host_mark(self) -> TimeMark:
        """Return a mark of the present moment on the host."""
        return TimeMark(self._now_ns(), self._run_queue_ns())

    def host_span(self, fields: RecordKey, mark: TimeMark) -> int:
        """Record a span of the host from `mark` to now. Returns its length in ns without run-queue delay."""
        end_ns = self._now_ns()
        waited_ns = self._run_queue_ns() - mark.run_queue_ns
        length_ns = end_ns - mark.time_ns
        flag = AUX_RUN_QUEUE
        if mark.processor_ns is not None:
            blocked_ns = length_ns - waited_ns - (self._processor_ns() - mark.processor_ns)
            fields = fields._replace(ordinal=duration_units(blocked_ns))
        self._write(self.step, fields, mark.time_ns, length_ns, duration_units(waited_ns), flag)
        return max(length_ns - waited_ns, 0)

    def host_enter(self, fields: RecordKey) -> TimeMark:
        """Begin a span of the host and publish it as open, so that a rank that hangs in it is seen."""
        processor_ns = self._processor_ns() if fields.kind in TIMED_KINDS else None
        mark = TimeMark(self._now_ns(), self._run_queue_ns(), None, processor_ns)
        self.ring.open_span(fields.kind, self.step, fields.microbatch, mark.time_ns)
        return mark

    def host_leave(self, fields: RecordKey, mark: TimeMark) -> int:
        """End the span that `host_enter` began. Returns its length in ns without run-queue delay."""
        own_ns = self.host_span(fields, mark)
        self.ring.close_span()
        return own_ns

    def enter(self, fields: RecordKey) -> TimeMark:
        """Begin a span of the compute stream, which here is the host's."""
        return self.host_enter(fields)

    def leave(self, fields: RecordKey, mark: TimeMark) -> None:
        """End the span that `enter` began."""
        self._on_length(fields.kind, fields.flags, self.host_leave(fields, mark))

    def leave_collective(self, fields: RecordKey, mark: TimeMark, size_bytes: Callable[[], int]) -> None:
        """End a collective that `enter` began; `size_bytes` is called where the record has it."""
        self.transfer(fields, mark, size_bytes())
        self.ring.close_span()

    def own_ns(self, mark: TimeMark) -> int:
        """Return the ns since `mark` without run-queue delay; 0 where only the device will know."""
        return max(self._now_ns() - mark.time_ns - (self._run_queue_ns() - mark.run_queue_ns), 0)

    def transfer(self, fields: RecordKey, mark: TimeMark, size_bytes: int) -> None:
        """Record the posting of a transfer of `size_bytes`."""
        length_ns = self._now_ns() - mark.time_ns
        self._write(self.step, fields, mark.time_ns, length_ns, size_bytes // BYTES_UNIT, AUX_BYTES)

    def copy(self, fields: RecordKey, copy: ObservedCopy) -> None:
        """Record the copy of a message, whose times are known already."""
        kind, microbatch, chunk, comm, ordinal, flags, _ = fields
        units, length_ns = copy.size_bytes // BYTES_UNIT, copy.end_ns - copy.start_ns
        flags |= AUX_BYTES
        self.ring.record(
            copy.start_ns, length_ns, self.step, ordinal, units, comm, microbatch, kind, chunk, copy.path, flags
        )

    def host_interval(self, fields: RecordKey, begin: TimeMark, end: TimeMark) -> None:
        """Record a span of the host between two marks."""
        waited = duration_units(end.run_queue_ns - begin.run_queue_ns)
        self._write(self.step, fields, begin.time_ns, end.time_ns - begin.time_ns, waited, AUX_RUN_QUEUE)

    def interval(self, fields: RecordKey, start_ns: int, length_ns: int) -> None:
        """Record a span whose times are known already."""
        self._write(self.step, fields, start_ns, length_ns, 0, 0)

    def work(self, microbatch: int, *, tokens: int, pairs: int) -> None:
        """Record the work of a microbatch."""
        tokens, pairs = min(tokens, MAX_DURATION_UNITS), min(-(-pairs // PAIRS_UNIT), MAX_DURATION_UNITS)
        self.ring.record(
            self._now_ns(), 0, self.step, pairs, tokens, NO_COMM, microbatch, RecordKind.WORK, 0, 0, AUX_WORK
        )

    def metric(self, metric: Metric, value: float) -> None:
        """Record a sample of this moment."""
        self.ring.record(
            self._now_ns(), 0, self.step, 0, float_bits(value), metric, NO_MICROBATCH, RecordKind.METRIC, 0, 0, 0
        )

    def finish(self) -> None:
        """Write pending spans, at the end of the run."""

    def _write(  # noqa: PLR0917 - the hot path takes positions only
        self, step: int, fields: RecordKey, start_ns: int, length_ns: int, aux: int, flag: int
    ) -> None:
        kind, microbatch, chunk, comm, ordinal, flags, layer = fields
        self.ring.record(start_ns, length_ns, step, ordinal, aux, comm, microbatch, kind, chunk, layer, flags | flag)
