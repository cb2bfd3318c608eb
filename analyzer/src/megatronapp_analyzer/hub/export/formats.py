"""The formats of a trace file, and the choice of one."""

import enum
import json
import pathlib

from megatronapp_analyzer.errors import HubError
from megatronapp_analyzer.hub.export.around import SLICE_BYTES
from megatronapp_analyzer.hub.export.chrome import chrome_trace
from megatronapp_analyzer.hub.export.perfetto import perfetto_trace
from megatronapp_analyzer.hub.export.tracks import ARROW_CATEGORY, TraceSource, tracks_of


class TraceFormat(enum.StrEnum):
    """Format of a trace file."""

    CHROME = "chrome"
    """JSON, for programs and chrome://tracing."""
    PERFETTO = "perfetto"
    """Protocol Buffers, for Perfetto."""

    @classmethod
    def of_file(cls, path: pathlib.Path) -> "TraceFormat":
        """Return the format of a file that is to be written, by its suffix."""
        return cls.PERFETTO if path.suffix in {".pftrace", ".perfetto-trace"} else cls.CHROME


_SPAN_BYTES = {TraceFormat.CHROME: 210, TraceFormat.PERFETTO: 95}
"""Usual size of a span of a training on CPUs (16,176 spans of PP2 x DP2), with arrows and counters."""
SUFFIXES = {TraceFormat.CHROME: ".json", TraceFormat.PERFETTO: ".pftrace"}


def spans_of_a_slice(format_: TraceFormat) -> int:
    """Return the number of spans that a part of a trace around a verdict has at most."""
    return SLICE_BYTES // _SPAN_BYTES[format_]


def trace_file(source: TraceSource, format_: TraceFormat) -> bytes:
    """Return the content of a trace file. Raises ExportError if `source` has no step."""
    trace = tracks_of(source)
    if format_ is TraceFormat.PERFETTO:
        return perfetto_trace(trace)
    return json.dumps(chrome_trace(trace), separators=(",", ":")).encode()


def summary(content: bytes, format_: TraceFormat) -> str:
    """Describe a trace file in some words. Raises HubError if it is none, as a hub may have sent it."""
    if format_ is TraceFormat.PERFETTO and content[:1] == b"\n":  # the first packet
        return f"{len(content) / 1e6:.2f} MB"
    try:
        events = json.loads(content)["traceEvents"]
        spans = sum(event["ph"] == "X" and event["cat"] != ARROW_CATEGORY for event in events)
        arrows = sum(event["ph"] == "s" for event in events)
    except (ValueError, LookupError, TypeError) as error:
        raise HubError("the hub did not answer with a trace; read its log") from error
    return f"{spans} spans, {arrows} arrows"
