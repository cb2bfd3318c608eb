"""Spans of the CUDA compute stream, recorded by the native recorder and read by its thread, never synchronised.

Events are recorded on the compute stream only: timing events on communication streams break the overlap that Megatron
relies on when CUDA_DEVICE_MAX_CONNECTIONS is 1.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from megatronapp_common.trace import BYTES_UNIT, RecordKind
from megatronapp_trainer.scan.recorder import AUX_BYTES, Recorder, RecordKey, TimeMark, TraceRing

FINISH_NS = 1_000_000_000
ANCHOR_KINDS = frozenset({RecordKind.GRAD_NORM})
"""Kinds at whose end the host has just waited for the device: only there can the two clocks be compared closely."""

log = logging.getLogger(__name__)


class NativeDeviceRecorder(Protocol):
    """Methods used of `megatronapp_native.DeviceRecorder`."""

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
        """Queue one ended span of the host."""

    def begin(  # noqa: PLR0917 - the hot path takes positions only
        self,
        kind: int,
        step: int,
        microbatch: int,
        chunk: int,
        comm: int,
        ordinal: int,
        layer: int,
        flags: int,
        stream: int,
        /,
    ) -> int:
        """Begin a span; returns its number."""

    def end(self, number: int, flags: int, is_anchor: bool, stream: int, /) -> None:
        """Record the end of a span."""

    def mark(  # noqa: PLR0917 - the hot path takes positions only
        self,
        kind: int,
        step: int,
        microbatch: int,
        chunk: int,
        comm: int,
        ordinal: int,
        layer: int,
        flags: int,
        stream: int,
        aux: int,
        /,
    ) -> None:
        """Record a span without a length."""

    def take_lengths(self) -> list[tuple[int, int, int]]:
        """Return (kind, flags, ns) of spans that were read."""

    def finish(self, timeout_ns: int) -> None:
        """Read what is pending and end the thread."""

    @property
    def dropped(self) -> int:
        """Number of spans that were dropped."""

    @property
    def failure(self) -> str:
        """Failure of the driver; empty without one."""


class QueuedRing:
    """The ring of a rank with a device: the native recorder's thread writes the records, so the host's are queued."""

    def __init__(self, ring: TraceRing, native: NativeDeviceRecorder) -> None:
        self.record = native.record
        self.open_span = ring.open_span
        self.close_span = ring.close_span
        self.heartbeat = ring.heartbeat
        self.clock_pair = ring.clock_pair
        self.close = ring.close


class DeviceRecorder(Recorder):
    """A recorder whose `enter` and `leave` enclose work of the compute stream."""

    def __init__(
        self,
        ring: TraceRing,
        *,
        native: NativeDeviceRecorder,
        current_stream: Callable[[], int],
        monotonic_ns: Callable[[], int],
        run_queue_ns: Callable[[], int],
        on_length: Callable[[int, int, int], None],
    ) -> None:
        queued = QueuedRing(ring, native)
        super().__init__(queued, monotonic_ns=monotonic_ns, run_queue_ns=run_queue_ns, on_length=on_length)
        self._native = native
        self._current_stream = current_stream
        self._dropped = 0
        self._has_failed = False

    def begin_step(self, step: int) -> None:
        """Assign later spans to `step`; reports the lengths of spans that the device has ended."""
        super().begin_step(step)
        for kind, flags, length_ns in self._native.take_lengths():
            self._on_length(kind, flags, length_ns)
        self._warn()

    def enter(self, fields: RecordKey) -> TimeMark:
        """Begin a span of the compute stream."""
        kind, microbatch, chunk, comm, ordinal, flags, layer = fields
        stream = self._current_stream()
        number = self._native.begin(kind, self.step, microbatch, chunk, comm, ordinal, layer, flags, stream)
        return TimeMark(0, 0, number)

    def leave(self, fields: RecordKey, mark: TimeMark) -> None:
        """End the span that `enter` began."""
        self._native.end(mark.event, fields.flags, fields.kind in ANCHOR_KINDS, self._current_stream())

    def leave_collective(self, fields: RecordKey, mark: TimeMark, size_bytes: Callable[[], int]) -> None:
        """End a collective that `enter` began; a span of the device has the lead of its host in place of the size."""
        self.leave(fields, mark)

    def transfer(self, fields: RecordKey, mark: TimeMark, size_bytes: int) -> None:
        """Record when the compute stream reached the post: only then is a tensor ready to be sent or filled.

        The host posts long before, so its clock would make every delivery seem late.
        """
        kind, microbatch, chunk, comm, ordinal, flags, layer = fields
        flags |= AUX_BYTES
        units, stream = size_bytes // BYTES_UNIT, self._current_stream()
        self._native.mark(kind, self.step, microbatch, chunk, comm, ordinal, layer, flags, stream, units)

    def own_ns(self, mark: TimeMark) -> int:
        """Return 0: only the device will know the length, later."""
        return 0

    def finish(self) -> None:
        """Write finished spans, waiting a moment for the last events; a stream that is stuck blocks no caller."""
        self._native.finish(FINISH_NS)
        self._warn()

    def _warn(self) -> None:
        """Log once that recording has failed, and whenever spans were dropped."""
        if not self._has_failed and (failure := self._native.failure):
            self._has_failed = True
            log.warning("spans of the device are no longer recorded: %s", failure)
        if (dropped := self._native.dropped) > self._dropped:
            log.warning(
                "%d spans were dropped: more were pending than the recorder has events for", dropped - self._dropped
            )
            self._dropped = dropped
