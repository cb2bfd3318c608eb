"""Spans of the CUDA compute stream: pooled events, read by polling, never synchronised.

Events are recorded on the compute stream only: timing events on communication streams break the overlap that Megatron
relies on when CUDA_DEVICE_MAX_CONNECTIONS is 1. A finished step is read at the boundary of a later one, when its events
are done anyway.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

from megatronapp_common.trace import BYTES_UNIT, Flag
from megatronapp_trainer.scan.recorder import Recorder, RecordKey, TimeMark, TraceRing, duration_units

CALIBRATIONS = 5
NS_PER_MS = 1e6
IDLE_POLLS = 20
"""Polls of an idle stream: an event is done some 10 us after it was recorded; a poll takes 1 to 2 us."""
FINISH_NS = 1_000_000_000
FINISH_POLL_S = 0.005


class CudaEvent(Protocol):
    """Methods used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Record the event in the current stream."""

    def query(self) -> bool:
        """Return True if the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""

    def elapsed_time(self, end: Any) -> float:  # noqa: ANN401 - an event of the same kind
        """Return the milliseconds from this event to `end`, as a 32-bit float."""


class DeviceClock:
    """Host time of events, by chaining elapsed times from anchor to anchor.

    A 32-bit float of milliseconds resolves 0.5 us at 4 to 8 s, so every step gets a separate anchor. The drift between
    the clocks is bounded by two facts: an event cannot be done before the host recorded it, nor after the host saw it
    done.
    """

    def __init__(self, new_event: Callable[[], CudaEvent], now_ns: Callable[[], int]) -> None:
        brackets = [_bracket(new_event(), now_ns) for _ in range(CALIBRATIONS)]
        width_ns, self._anchor_ns, self._anchor = min(brackets, key=lambda bracket: bracket[0])
        self.uncertainty_ns = width_ns // 2

    def advance(self, anchor: CudaEvent, recorded_ns: int, seen_ns: int) -> None:
        """Continue from a newer anchor that is done."""
        predicted_ns = self.host_ns(anchor)
        self._anchor, self._anchor_ns = anchor, min(max(predicted_ns, recorded_ns), seen_ns)

    def host_ns(self, event: CudaEvent) -> int:
        """Return the monotonic host time, in ns, at which a finished event was passed."""
        return self._anchor_ns + round(self._anchor.elapsed_time(event) * NS_PER_MS)


def _bracket(event: CudaEvent, now_ns: Callable[[], int]) -> tuple[int, int, CudaEvent]:
    before_ns = now_ns()
    event.record()
    event.synchronize()  # before training: the only place where the host waits for the device
    after_ns = now_ns()
    return after_ns - before_ns, (before_ns + after_ns) // 2, event


@dataclasses.dataclass(slots=True)
class _PendingSpan:
    step: int
    fields: RecordKey
    start: CudaEvent
    end: CudaEvent
    launched_ns: int = 0
    """Time at which the host had launched all of the span; 0 for a post."""
    aux: int = 0
    flags: int = Flag.DEVICE_CLOCK | Flag.AUX_LEAD


@dataclasses.dataclass(slots=True)
class _ClockAnchor:
    event: CudaEvent
    recorded_ns: int
    seen_ns: int | None = None
    """Time at which it was first seen to be done."""


class DeviceRecorder(Recorder):
    """A recorder whose `enter` and `leave` enclose work of the compute stream."""

    def __init__(
        self,
        ring: TraceRing,
        *,
        monotonic_ns: Callable[[], int],
        run_queue_ns: Callable[[], int],
        on_length: Callable[[RecordKey, int], None],
        new_event: Callable[[], CudaEvent],
    ) -> None:
        super().__init__(ring, monotonic_ns=monotonic_ns, run_queue_ns=run_queue_ns, on_length=on_length)
        self._new_event = new_event
        self._free: list[CudaEvent] = []
        self._pending: collections.deque[_PendingSpan | _ClockAnchor] = collections.deque()
        self._anchor: _ClockAnchor | None = None
        """Anchor of the step, until it was seen to be done."""
        self.clock = DeviceClock(new_event, monotonic_ns)

    def begin_step(self, step: int) -> None:
        """Assign later spans to `step`; writes finished spans of earlier steps."""
        super().begin_step(step)
        self._harvest()
        idle = not self._pending
        recorded_ns = self._now_ns()
        self._anchor = _ClockAnchor(self._recorded_event(), recorded_ns)
        self._pending.append(self._anchor)
        for _ in range(IDLE_POLLS if idle else 1):
            self._poll_anchor()

    def enter(self, fields: RecordKey) -> TimeMark:
        """Begin a span of the compute stream."""
        self._poll_anchor()
        now_ns = self._now_ns()
        self.ring.open_span(fields.kind, self.step, fields.microbatch, now_ns)
        return TimeMark(now_ns, 0, self._recorded_event())

    def leave(self, fields: RecordKey, mark: TimeMark) -> None:
        """End the span that `enter` began."""
        end = self._recorded_event()
        self._pending.append(_PendingSpan(self.step, fields, mark.event, end, self._now_ns()))
        self.ring.close_span()

    def transfer(self, fields: RecordKey, mark: TimeMark, size_bytes: int) -> None:
        """Record when the compute stream reached the post: only then is a tensor ready to be sent or filled.

        The host posts long before, so its clock would make every delivery seem late.
        """
        reached = self._recorded_event()
        flags = Flag.DEVICE_CLOCK | Flag.AUX_BYTES
        self._pending.append(_PendingSpan(self.step, fields, reached, reached, 0, size_bytes // BYTES_UNIT, flags))

    def own_ns(self, mark: TimeMark) -> int:
        """Return 0: only the device will know the length, later."""
        return 0

    def finish(self) -> None:
        """Write finished spans, waiting a moment for the last events; a stream that is stuck blocks no caller."""
        deadline_ns = self._now_ns() + FINISH_NS
        self._harvest()
        while self._pending and self._now_ns() < deadline_ns:
            time.sleep(FINISH_POLL_S)
            self._harvest()

    def _recorded_event(self) -> CudaEvent:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def _poll_anchor(self) -> None:
        """Poll the anchor: the sooner it is seen to be done, the closer the clocks stay, from which leads follow."""
        if self._anchor is not None and self._anchor.event.query():
            self._anchor.seen_ns = self._now_ns()
            self._anchor = None

    def _harvest(self) -> None:
        """Write the finished spans. The stream passes events in order, so the first one not done ends the search."""
        while self._pending:
            head = self._pending[0]
            if not (head.event if isinstance(head, _ClockAnchor) else head.end).query():
                return
            self._pending.popleft()
            if isinstance(head, _ClockAnchor):
                self.clock.advance(head.event, head.recorded_ns, head.seen_ns or self._now_ns())
            else:
                self._write_pending(head)

    def _write_pending(self, span: _PendingSpan) -> None:
        start_ns = self.clock.host_ns(span.start)
        length_ns = 0 if span.start is span.end else round(span.start.elapsed_time(span.end) * NS_PER_MS)
        aux = span.aux
        if span.flags & Flag.AUX_LEAD:
            aux = duration_units(start_ns + length_ns - span.launched_ns)
        self._write(span.step, span.fields, start_ns, length_ns, aux, span.flags)
        self._on_length(span.fields, length_ns)
        self._free += {span.start, span.end}
