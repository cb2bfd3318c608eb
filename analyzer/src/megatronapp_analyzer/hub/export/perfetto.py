"""Perfetto's protobuf trace: TrackEvent packets with interned strings, half of the size of the JSON.

Numbers of fields are those of `perfetto_trace.proto`; each line that writes one has its name.
"""

from collections.abc import Iterator, Mapping, Sequence

from megatronapp_analyzer.hub.export import protobuf as pb
from megatronapp_analyzer.hub.export.tracks import (
    ARROW_CATEGORY,
    ARROW_END,
    Argument,
    CounterTrack,
    Span,
    TrackedTrace,
)

_PACKET = 1  # Trace.packet
_SEQUENCE = 1
"""Number of the only writer."""
_STATE_CLEARED, _NEEDS_STATE = 1, 2  # TracePacket.SequenceFlags
_SLICE_BEGIN, _SLICE_END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_BOOT_TIME, _REAL_TIME = 6, 1  # BuiltinClock
_BY_RANK = 3  # TrackDescriptor.ChildTracksOrdering.EXPLICIT
_FIRST_PROCESS, _FIRST_TRACK, _FIRST_COUNTER = 1 << 32, 2 << 32, 3 << 32
"""Identifiers of tracks; 0 is not one."""


class _Interned:
    """Numbers of strings, from 1 on."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, value: str) -> int:
        return self._numbers.setdefault(value, len(self._numbers) + 1)

    def entries(self, field: int) -> bytes:
        """Return them as entries of InternedData."""
        return b"".join(
            pb.message(field, pb.integer(1, number) + pb.text(2, value))  # iid, name
            for value, number in self._numbers.items()
        )


class _Events:
    """Begin and end of spans, and ends of arrows, with the strings that they refer to."""

    def __init__(self, arrows: Sequence[tuple[int, int]]) -> None:
        self._names, self._categories, self._argument_names = _Interned(), _Interned(), _Interned()
        self._flows: dict[int, bytes] = {}
        self._arrows = arrows
        for number, (sent, _) in enumerate(arrows, start=1):
            self._flows[sent] = self._flows.get(sent, b"") + pb.fixed64(47, number)  # flow_ids

    def of_track(self, spans: Sequence[tuple[int, Span]]) -> Iterator[tuple[int, bytes]]:
        """Yield times and events of the spans of a track, each end before what begins at that time or later."""
        open_ends: list[int] = []
        track = pb.integer(11, _FIRST_TRACK + spans[0][1].track)  # track_uuid
        end = pb.integer(9, _SLICE_END) + track  # type
        for number, span in spans:
            while open_ends and open_ends[-1] <= span.start_ns:
                yield open_ends.pop(), end
            yield span.start_ns, self._begin(number, span) + track
            open_ends.append(span.end_ns)
        while open_ends:
            yield open_ends.pop(), end

    def arrow_ends(self, spans: Sequence[Span]) -> Iterator[tuple[int, bytes]]:
        """Yield times and events in which arrows end, which are those of all tracks."""
        for number, (_, received) in enumerate(self._arrows, start=1):
            span = spans[received]
            track = pb.integer(11, _FIRST_TRACK + span.track)  # track_uuid
            event = self._event(_INSTANT, ARROW_CATEGORY, ARROW_END, span.arrow_end_arguments)
            yield span.arrow_end_ns, event + pb.fixed64(48, number) + track  # terminating_flow_ids

    def _begin(self, number: int, span: Span) -> bytes:
        event = self._event(_SLICE_BEGIN, span.category, span.name, span.arguments)
        return event + self._flows.get(number, b"")

    def _event(self, kind: int, category: str, name: str, arguments: Mapping[str, Argument]) -> bytes:
        return b"".join(
            (
                pb.integer(9, kind),  # type
                pb.integer(3, self._categories.number(category)),  # category_iids
                pb.integer(10, self._names.number(name)),  # name_iid
                *(pb.message(4, self._annotation(key, value)) for key, value in arguments.items()),
            )
        )

    def _annotation(self, name: str, value: Argument) -> bytes:
        """Return the content of a DebugAnnotation."""
        found = pb.integer(1, self._argument_names.number(name))  # name_iid
        if isinstance(value, bool):
            return found + pb.integer(2, value)  # bool_value
        if isinstance(value, int):
            return found + pb.integer(4, value)  # int_value
        if isinstance(value, float):
            return found + pb.double(5, value)  # double_value
        return found + pb.text(6, value)  # string_value

    def interned(self) -> bytes:
        """Return InternedData with all strings so far."""
        return self._categories.entries(1) + self._names.entries(2) + self._argument_names.entries(3)


def perfetto_trace(trace: TrackedTrace) -> bytes:
    """Return the trace as Perfetto's protobuf."""
    events = _Events(trace.arrows)
    of_track: list[list[tuple[int, Span]]] = [[] for _ in trace.tracks]
    for number, span in enumerate(trace.spans):
        of_track[span.track].append((number, span))
    timed = [event for spans in of_track if spans for event in events.of_track(spans)]
    timed += events.arrow_ends(trace.spans)
    for number, counter in enumerate(trace.counters):
        timed += _samples(number, counter)
    timed.sort(key=lambda event: event[0])  # stable: the order of each track stays, and arrows begin before they end
    state = pb.integer(41, 1) + pb.integer(13, _STATE_CLEARED | _NEEDS_STATE)  # incremental_state_cleared
    needs = pb.integer(13, _NEEDS_STATE)  # sequence_flags
    packets = [
        _clocks(trace.origin_ns),
        state + pb.message(12, events.interned()),  # interned_data
        *_descriptors(trace),
        *(pb.integer(8, time_ns) + needs + pb.message(11, event) for time_ns, event in timed),  # timestamp, track_event
    ]
    writer = pb.integer(10, _SEQUENCE)  # trusted_packet_sequence_id
    return b"".join(pb.message(_PACKET, packet + writer) for packet in packets)


def _clocks(origin_ns: int) -> bytes:
    """Return a ClockSnapshot that gives the real time of 0, which is the first span."""
    times = ((_BOOT_TIME, 0), (_REAL_TIME, origin_ns))
    clocks = b"".join(pb.message(1, pb.integer(1, clock) + pb.integer(2, at)) for clock, at in times)
    return pb.message(6, clocks + pb.integer(2, _BOOT_TIME))  # clock_snapshot, primary_trace_clock


def _descriptors(trace: TrackedTrace) -> Iterator[bytes]:
    """Yield a TrackDescriptor for each process, track and counter."""
    for process, name in trace.processes.items():
        described = pb.integer(1, process + 1) + pb.text(6, name)  # pid, which is above 0, process_name
        yield _descriptor(_FIRST_PROCESS + process, pb.message(3, described) + pb.integer(11, _BY_RANK))
    for number, track in enumerate(trace.tracks):
        order = pb.integer(12, number)  # sibling_order_rank
        named = pb.text(2, track.name) + pb.integer(5, _FIRST_PROCESS + track.process)  # name, parent_uuid
        yield _descriptor(_FIRST_TRACK + number, named + order)
    for number, counter in enumerate(trace.counters):
        named = pb.text(2, counter.name) + pb.integer(5, _FIRST_PROCESS + counter.process)
        order = pb.integer(12, len(trace.tracks) + number)
        yield _descriptor(_FIRST_COUNTER + number, named + order + pb.message(8, b""))  # counter


def _descriptor(uuid: int, content: bytes) -> bytes:
    return pb.message(60, pb.integer(1, uuid) + content)  # track_descriptor, uuid


def _samples(number: int, counter: CounterTrack) -> Iterator[tuple[int, bytes]]:
    track = pb.integer(9, _COUNTER) + pb.integer(11, _FIRST_COUNTER + number)  # type, track_uuid
    for time_ns, value in counter.points:
        yield time_ns, track + pb.double(44, value)  # double_counter_value
