"""Chrome trace JSON for Perfetto and chrome://tracing: a process per worker, threads for the tracks of its ranks.

Times are microseconds after the first span (`ts`), whose real time is in the metadata. Format: "Trace Event Format" of
the Chromium project.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatronapp_analyzer.hub.export.tracks import ARROW_CATEGORY, ARROW_END, Span, TrackedTrace, TrackRole
from megatronapp_analyzer.hub.ingest.ring_metadata import MAX_WORLD
from megatronapp_common.trace import RecordKind

Event = dict[str, Any]
_COLOURS: Mapping[int, str] = {RecordKind.FAULT: "terrible", RecordKind.RECV_WAIT: "grey", RecordKind.SEND_WAIT: "grey"}


def chrome_trace(trace: TrackedTrace) -> dict[str, Any]:
    """Build the trace document."""
    threads = thread_numbers(trace)
    events = [
        *_names(trace, threads),
        *(_span_event(span, trace, threads) for span in trace.spans),
        *_arrow_events(trace, threads),
        *_counter_events(trace),
    ]
    metadata = {
        "job": trace.job,
        "originRealTimeNs": str(trace.origin_ns),
        "firstStep": list(trace.first_step),
        "lastStep": list(trace.last_step),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "metadata": metadata}


def thread_numbers(trace: TrackedTrace) -> list[int]:
    """Return the thread of each track: of a host the rank, of the rank's other tracks numbers above all ranks."""
    others: dict[int, int] = {}
    threads = []
    for track in trace.tracks:
        if (track.role, track.row) == (TrackRole.HOST, 0):
            threads.append(track.rank)
            continue
        others[track.rank] = others.get(track.rank, 0) + 1
        threads.append(track.rank + others[track.rank] * MAX_WORLD)
    return threads


def microseconds(time_ns: int) -> float:
    """Return a time in microseconds from which truncation and rounding give these nanoseconds again.

    Perfetto truncates. 4.035 us, for example, are 4034.9999999999995 ns, and the span would no longer begin at the end
    of the one before it.
    """
    found = time_ns / 1000
    while int(found * 1000) < time_ns:
        found = math.nextafter(found, math.inf)
    return found


def _names(trace: TrackedTrace, threads: list[int]) -> Iterator[Event]:
    """Yield names and order of processes and threads."""
    for process, name in trace.processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for place, (track, thread) in enumerate(zip(trace.tracks, threads, strict=True)):
        at = {"ph": "M", "pid": track.process, "tid": thread}
        yield at | {"name": "thread_name", "args": {"name": track.name}}
        yield at | {"name": "thread_sort_index", "args": {"sort_index": place}}


def _span_event(span: Span, trace: TrackedTrace, threads: list[int]) -> Event:
    track = trace.tracks[span.track]
    event: Event = {
        "name": span.name,
        "cat": span.category,
        "ph": "X",
        "pid": track.process,
        "tid": threads[span.track],
        "ts": microseconds(span.start_ns),
        "dur": microseconds(span.end_ns - span.start_ns),
        "args": span.arguments,
    }
    colour = _COLOURS.get(span.kind)
    return event | {"cname": colour} if colour else event


def _arrow_events(trace: TrackedTrace, threads: list[int]) -> Iterator[Event]:
    """Yield an arrow from the start of each send to a span without length at the end of its receive.

    All starts are first, since viewers sort by time and leave the order of events of one time as it is.
    """
    flow: Event = {"name": "message", "cat": "p2p"}
    for number, (sent, _) in enumerate(trace.arrows):
        source = trace.spans[sent]
        at = {"pid": trace.tracks[source.track].process, "tid": threads[source.track]}
        yield flow | at | {"id": str(number), "ph": "s", "ts": microseconds(source.start_ns)}
    for number, (_, received) in enumerate(trace.arrows):
        target = trace.spans[received]
        end: Event = {
            "pid": trace.tracks[target.track].process,
            "tid": threads[target.track],
            "ts": microseconds(target.arrow_end_ns),
        }
        yield end | {"name": ARROW_END, "cat": ARROW_CATEGORY, "ph": "X", "dur": 0, "args": target.arrow_end_arguments}
        yield flow | end | {"id": str(number), "ph": "f", "bp": "e"}


def _counter_events(trace: TrackedTrace) -> Iterator[Event]:
    for counter in trace.counters:
        for time_ns, value in counter.points:
            at = {"pid": counter.process, "ts": microseconds(time_ns)}
            yield {"ph": "C", "name": counter.name, "args": {"value": value}} | at
