"""Perfetto's rule for the spans of a track, by which it drops some, and its reading of both formats of a trace."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb


@dataclasses.dataclass(frozen=True)
class ViewedSpan:
    """A span as Perfetto shows it, in nanoseconds."""

    track: Any
    name: str
    start_ns: int
    end_ns: int


def dropped(spans: Iterable[ViewedSpan]) -> list[ViewedSpan]:
    """Return the spans that Perfetto drops: those that outlast one that is open on their track when they begin.

    As in `SliceTracker::MaybeCloseStack`; spans are read in the order of their starts, and of the file if equal.
    """
    open_ends: dict[Any, list[int]] = {}
    found = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        stack = open_ends.setdefault(span.track, [])
        while stack and stack[-1] <= span.start_ns:
            stack.pop()
        if stack and span.end_ns > stack[-1]:
            found.append(span)
        else:
            stack.append(span.end_ns)
    return found


def read_chrome(document: Mapping[str, Any]) -> list[ViewedSpan]:
    """Read the complete events of a Chrome trace; microseconds become whole nanoseconds by truncation."""
    return [
        ViewedSpan(
            (event["pid"], event["tid"]),
            event["name"],
            int(event["ts"] * 1000),
            int(event["ts"] * 1000) + int(event["dur"] * 1000),
        )
        for event in document["traceEvents"]
        if event["ph"] == "X"
    ]


@dataclasses.dataclass(frozen=True)
class ViewedTrace:
    """Content of a protobuf trace, with names in the place of numbers."""

    tracks: Mapping[str, str]
    """Name of each track, and that of its process."""
    spans: list[ViewedSpan]
    arguments: list[dict[str, Any]]
    """Annotations of each span, with its category."""
    flows: dict[int, list[str]]
    """Names of the spans that each flow leads from and to; of an event within a span that of the span."""
    counters: dict[str, list[tuple[int, float]]]


def read_perfetto(content: bytes) -> ViewedTrace:
    """Read a trace with Perfetto's own schema. Fails for strings and tracks that are not defined."""
    packets = pb.Trace.FromString(content).packet
    names, parents, interned = _definitions(packets)
    spans: list[ViewedSpan] = []
    arguments: list[dict[str, Any]] = []
    flows: dict[int, list[str]] = {}
    counters: dict[str, list[tuple[int, float]]] = {}
    open_spans: dict[int, list[int]] = {}
    for packet in sorted(
        (packet for packet in packets if packet.HasField("track_event")), key=lambda packet: packet.timestamp
    ):
        event, at = packet.track_event, packet.timestamp
        track = names[event.track_uuid]
        stack = open_spans.setdefault(event.track_uuid, [])
        if event.type == pb.TrackEvent.TYPE_COUNTER:
            counters.setdefault(track, []).append((at, event.double_counter_value))
        elif event.type == pb.TrackEvent.TYPE_SLICE_END:
            number = stack.pop()
            spans[number] = dataclasses.replace(spans[number], end_ns=at)
        else:
            name = interned["event_names"][event.name_iid]
            if event.type == pb.TrackEvent.TYPE_INSTANT:
                spans.append(ViewedSpan(track, name, at, at))
                name = spans[stack[-1]].name if stack else name
            else:
                stack.append(len(spans))
                spans.append(ViewedSpan(track, name, at, -1))
            values = {
                interned["debug_annotation_names"][value.name_iid]: getattr(value, value.WhichOneof("value"))
                for value in event.debug_annotations
            }
            arguments.append(values | {"category": interned["event_categories"][event.category_iids[0]]})
            assert flows.keys() >= set(event.terminating_flow_ids), "Perfetto ignores the end of a flow without a start"
            for place, numbers in enumerate((event.flow_ids, event.terminating_flow_ids)):
                for flow in numbers:
                    flows.setdefault(flow, ["", ""])[place] = f"{name} on {track}"
    assert not any(open_spans.values()), "spans without an end"
    tracks = {name: names.get(parents[uuid], "") for uuid, name in names.items()}
    return ViewedTrace(tracks, spans, arguments, flows, counters)


def _definitions(packets: Iterable[Any]) -> tuple[dict[int, str], dict[int, int], dict[str, dict[int, str]]]:
    """Return names and parents of tracks, and tables of interned strings."""
    names: dict[int, str] = {}
    parents: dict[int, int] = {}
    interned: dict[str, dict[int, str]] = {}
    for packet in packets:
        assert packet.trusted_packet_sequence_id
        if packet.HasField("interned_data"):
            assert packet.incremental_state_cleared
            for table in ("event_names", "event_categories", "debug_annotation_names"):
                interned[table] = {entry.iid: entry.name for entry in getattr(packet.interned_data, table)}
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            names[described.uuid] = described.name or described.process.process_name
            parents[described.uuid] = described.parent_uuid
    return names, parents, interned
