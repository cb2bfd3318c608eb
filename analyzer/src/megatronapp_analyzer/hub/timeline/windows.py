"""Spans of some tracks in some time, with spans shorter than a pixel merged as a picture draws them. Pure NumPy."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.ingest.digest import durations_ns, is_kind
from megatronapp_analyzer.hub.timeline.columns import SAMPLE_KINDS, Ints, StepColumns
from megatronapp_common.trace import RecordKind

MAX_PIXELS = 8192
MAX_TRACKS = 512
MAX_RANKS = 64
MAX_SPANS = 100_000
"""Spans of an answer at most: of a part with more, spans are merged over wider pixels."""
_KINDS = 256
_EDGE_KINDS = SAMPLE_KINDS | {
    RecordKind.STEP,
    RecordKind.LAYER_FORWARD,
    RecordKind.LAYER_BACKWARD,
    RecordKind.COPY,
    RecordKind.NCCL,
    RecordKind.FAULT,
    RecordKind.STOPPED,
}
"""Kinds that are drawn at the edges of a track; spans of all others follow each other in its middle."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Part of a step that is requested: time after its origin, and tracks by place or by rank."""

    from_ns: int
    to_ns: int
    pixels: int
    first_track: int = 0
    tracks: int = MAX_TRACKS
    ranks: Sequence[int] | None = None
    """Instead of places of tracks."""
    span: int | None = None
    """Place of a span that is in the answer wherever it is, with its neighbours and the other end of its message."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WindowSpans:
    """Places of the spans of a part, ascending, and how many spans were merged into each."""

    places: Ints
    merged: Ints
    flows: Ints
    """Pairs [n, 2] of rows of `places`: the send and the receive of a message."""
    pixels: int
    """Pixels over which spans are merged: fewer than requested where the answer would have more than MAX_SPANS."""


def select_window(columns: StepColumns, bounds: Bounds) -> WindowSpans:
    """Return the spans of a part of a step."""
    rows = _rows(columns, _tracks(columns, bounds))
    starts, lengths = columns.starts_ns[rows], durations_ns(columns.records[rows])
    visible = (starts <= bounds.to_ns) & (starts + lengths >= bounds.from_ns) & columns.is_span[rows]
    rows, starts, lengths = rows[visible], starts[visible], lengths[visible]
    pixels = bounds.pixels
    while True:
        places, merged = _merge(columns, rows, starts, lengths, (bounds.from_ns, bounds.to_ns, pixels))
        if len(places) <= MAX_SPANS or pixels == 1:
            break
        pixels = max(1, pixels // 2)
    if bounds.span is not None:
        places, merged = _with(places, merged, _around(columns, bounds.span))
    return WindowSpans(places=places, merged=merged, flows=_flows(columns, places), pixels=pixels)


def _tracks(columns: StepColumns, bounds: Bounds) -> Ints:
    """Return the places of the requested tracks."""
    if bounds.ranks is None:
        return np.arange(bounds.first_track, min(bounds.first_track + bounds.tracks, len(columns.track_ranks)))
    return np.flatnonzero(np.isin(columns.track_ranks, np.asarray(bounds.ranks, np.int64)))


def _rows(columns: StepColumns, tracks: Ints) -> Ints:
    """Return the places of all records of some tracks, ascending."""
    begin, end = columns.track_begin[tracks], columns.track_end[tracks]
    sizes = end - begin
    offsets = np.cumsum(sizes) - sizes
    rows: Ints = np.arange(int(sizes.sum())) + np.repeat(begin - offsets, sizes)
    return np.sort(rows)


def _merge(
    columns: StepColumns, rows: Ints, starts: Ints, lengths: Ints, axis: tuple[int, int, int]
) -> tuple[Ints, Ints]:
    """Return which spans are drawn, the first of a rank and kind on a pixel, and how many were merged into each."""
    from_ns, to_ns, pixels = axis
    pixel_ns = (to_ns - from_ns) / pixels
    is_short = lengths < pixel_ns
    short = rows[is_short]
    cell = np.floor((starts[is_short] - from_ns) / pixel_ns).astype(np.int64) + 1
    track_kind = columns.records["rank"][short].astype(np.int64) * _KINDS + columns.records["kind"][short]
    _, first, counts = np.unique(track_kind * (pixels + 2) + cell, return_index=True, return_counts=True)
    places = np.concatenate([rows[~is_short], short[first]])
    merged = np.concatenate([np.ones(len(places) - len(first), np.int64), counts])
    order = np.argsort(places)
    return places[order], merged[order]


def _with(places: Ints, merged: Ints, more: Ints) -> tuple[Ints, Ints]:
    """Return spans with some others."""
    fresh = np.setdiff1d(more, places)
    every = np.concatenate([places, fresh])
    order = np.argsort(every)
    return every[order], np.concatenate([merged, np.ones(len(fresh), np.int64)])[order]


def _around(columns: StepColumns, place: int) -> Ints:
    """Return a span, those before and after it and the first and last of its track, and its message's other end.

    Empty where the step has no span.
    """
    if place >= len(columns.records) or not columns.is_span[place]:
        return np.zeros(0, np.int64)
    track = int(np.flatnonzero(columns.track_ranks == int(columns.records["rank"][place]))[0])
    rows = _rows(columns, np.array([track]))
    main = rows[~is_kind(columns.records[rows], frozenset(_EDGE_KINDS))]
    order = np.lexsort((-durations_ns(columns.records[main]), columns.starts_ns[main]))
    main = main[order]
    at = np.flatnonzero(main == place)
    near = [place, *main[:1].tolist(), *main[-1:].tolist()]
    if len(at):
        near += main[max(0, int(at[0]) - 1) : int(at[0]) + 2].tolist()
    near += [int(ends[place]) for ends in (columns.receive_of, columns.send_of) if ends[place] >= 0]
    return np.unique(np.array(near, np.int64))


def _flows(columns: StepColumns, places: Ints) -> Ints:
    """Return the messages of which both ends are among some spans."""
    receive = columns.receive_of[places].astype(np.int64)
    sends = np.flatnonzero(receive >= 0)
    found = np.searchsorted(places, receive[sends])
    known = np.zeros(len(sends), np.bool_)
    inside = found < len(places)
    known[inside] = places[found[inside]] == receive[sends][inside]
    return np.stack([sends[known], found[known]], axis=1)


def rank_runs(ranks: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ranks as runs of consecutive ones: the first rank of each, and how many it has."""
    if not len(ranks):
        return []
    begin = np.concatenate([[0], np.flatnonzero(np.diff(ranks) != 1) + 1])
    sizes = np.diff(np.append(begin, len(ranks)))
    return list(zip(ranks[begin].tolist(), sizes.tolist(), strict=True))
