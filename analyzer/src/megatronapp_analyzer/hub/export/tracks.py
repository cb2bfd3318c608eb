"""Spans, arrows and counters of steps on the tracks of a viewer, in no format yet.

A process is a worker, and a rank has up to three tracks: what its host does, what its device does, and the messages on
their way to it. Times are nanoseconds after the first span.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import ExportError
from megatronapp_analyzer.hub.export.nesting import Nanoseconds, place_spans
from megatronapp_analyzer.hub.ingest.curves import CurvePoint
from megatronapp_analyzer.hub.ingest.digest import durations_ns
from megatronapp_analyzer.hub.ingest.ingest import CounterSample, TraceIngest
from megatronapp_analyzer.hub.ingest.message_arrows import match_transfers, peers
from megatronapp_analyzer.hub.ingest.ring_metadata import RankRing
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.state.ranks import kind_name
from megatronapp_analyzer.model import Communicator
from megatronapp_common.text.ranges import format_ranges
from megatronapp_common.topology import RankRole
from megatronapp_common.trace import (
    BYTES_UNIT,
    COLLECTIVE_KINDS,
    DURATION_UNIT_NS,
    NO_LAYER,
    NO_MICROBATCH,
    PASS_KINDS,
    Counter,
    Flag,
    LayerSite,
    PassFlag,
    RecordKind,
)

JOB_PROCESS = 1_000_000
"""Process of the curves, above any worker's index."""
LAYER_KINDS = frozenset({int(RecordKind.LAYER_FORWARD), int(RecordKind.LAYER_BACKWARD)})
_SITES = {int(site): site.name.lower() for site in LayerSite}
_COUNTERS = frozenset(int(counter) for counter in Counter)
_CATEGORIES: Mapping[int, str] = {
    RecordKind.FAULT: "fault",
    RecordKind.STEP: "step",
    RecordKind.COPY: "copy",
    RecordKind.NCCL: "copy",
}
Argument = int | float | str | bool
ARROW_END = "received"
"""Name of the event in which an arrow ends."""
ARROW_CATEGORY = "arrow"
"""Category of these events, which are no recorded spans."""


class TrackRole(enum.StrEnum):
    """Whose work a track of a rank shows."""

    HOST = "host"
    DEVICE = "device"
    TRANSFERS = "transfers"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceSource:
    """Input of a trace. `rings` are those of the attempts that the steps belong to."""

    job: str
    rings: Sequence[RankRing]
    steps: Sequence[StoredStep]
    samples: Sequence[CurvePoint] = ()
    counters: Sequence[CounterSample] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Track:
    """A row of spans that are nested or disjoint."""

    process: int
    rank: int
    role: TrackRole
    row: int
    """0, or more where spans overlap."""
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A span on a track; `kind` is that of its record."""

    track: int
    """Index of its track."""
    start_ns: int
    end_ns: int
    name: str
    kind: int
    category: str
    arguments: Mapping[str, Argument]

    @property
    def arrow_end_ns(self) -> int:
        """Return when an arrow to this span ends: the last nanosecond of a receive.

        An event at this time ends the arrow. A receive that waits begins before its message is sent, and Perfetto
        ignores the end of a flow that has not begun.
        """
        return max(self.start_ns, self.end_ns - 1)

    @property
    def arrow_end_arguments(self) -> dict[str, Argument]:
        """Return the arguments of the event in which an arrow to this span ends."""
        return {name: self.arguments[name] for name in ("attempt", "step") if name in self.arguments}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CounterTrack:
    """Samples of a number: pairs of time and value."""

    process: int
    name: str
    points: Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrackedTrace:
    """Everything that a viewer shows of some steps. Spans of a track are in order, enclosing ones first."""

    job: str
    origin_ns: int
    """Real time of 0."""
    first_step: tuple[int, int]
    last_step: tuple[int, int]
    processes: Mapping[int, str]
    tracks: Sequence[Track]
    spans: Sequence[Span]
    arrows: Sequence[tuple[int, int]]
    """Indices of the spans that send and receive a message."""
    counters: Sequence[CounterTrack]


def source_of(ingest: TraceIngest, job: str, steps: Sequence[StoredStep]) -> TraceSource:
    """Collect everything that `ingest` has about `steps`."""
    attempts = {step.view.attempt for step in steps}
    return TraceSource(
        job=job,
        rings=[ring for attempt in sorted(attempts) for ring in ingest.attempts[attempt].rings.values()],
        steps=steps,
        samples=ingest.curves.points(),
        counters=list(ingest.counters),
    )


def tracks_of(source: TraceSource) -> TrackedTrace:
    """Place the spans of all steps. Raises ExportError if `source` has no step."""
    if not source.steps:
        raise ExportError(f"job {source.job}: no step of that range is held; leave out --from and --to")
    origin = min(int(_starts(step).min()) for step in source.steps)
    newest = {ring.rank: ring for ring in sorted(source.rings, key=lambda ring: ring.attempt)}
    tracks, spans, places = _placed(source, newest, origin)
    keys = [step.key for step in source.steps]
    return TrackedTrace(
        job=source.job,
        origin_ns=origin,
        first_step=keys[0],
        last_step=keys[-1],
        processes=_processes(source.job, newest.values()),
        tracks=tracks,
        spans=spans,
        arrows=[
            (int(places[number][send]), int(places[number][receive]))
            for number, step in enumerate(source.steps)
            for send, receive in match_transfers(step.view)
        ],
        counters=[*_curves(source, origin), *_counters(source, origin)],
    )


def _starts(step: StoredStep) -> Nanoseconds:
    records = step.view.records
    starts: Nanoseconds = records["start_ns"].astype(np.int64) + step.offsets_ns[records["rank"]]
    return starts


def _processes(job: str, rings: Iterable[RankRing]) -> dict[int, str]:
    workers = {ring.worker: f"worker {ring.worker} on {ring.node}" for ring in rings}
    return dict(sorted(workers.items())) | {JOB_PROCESS: f"job {job}"}


def _rank_name(rank: int, ring: RankRing | None) -> str:
    if ring is None:
        return f"rank {rank}"
    role = "" if ring.role is RankRole.ALL else f"{ring.role} "
    place = ring.coordinates
    return f"{role}rank {rank} (pp {place.pp}, dp {place.dp}, tp {place.tp})"


def _roles(kinds: NDArray[np.uint8], flags: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the place of each record's role in TrackRole."""
    on_device = (flags & Flag.DEVICE_CLOCK) != 0
    return np.where(np.isin(kinds, (RecordKind.COPY, RecordKind.NCCL)), 2, np.where(on_device, 1, 0))


def _placed(
    source: TraceSource, newest: Mapping[int, RankRing], origin: int
) -> tuple[list[Track], list[Span], list[NDArray[np.int64]]]:
    """Return tracks, spans by track, and for each step the index of each record's span."""
    starts = np.concatenate([_starts(step) for step in source.steps]) - origin
    lengths = np.concatenate([durations_ns(step.view.records) for step in source.steps])
    sizes = [len(step.view.records) for step in source.steps]
    step_of = np.repeat(np.arange(len(sizes)), sizes)
    row_of = np.concatenate([np.arange(size) for size in sizes])
    others = [peers(step.view) for step in source.steps]
    places = [np.zeros(size, np.int64) for size in sizes]
    ranks, roles = (
        np.concatenate(parts)
        for parts in (
            [step.view.records["rank"] for step in source.steps],
            [_roles(step.view.records["kind"], step.view.records["flags"]) for step in source.steps],
        )
    )
    tracks: list[Track] = []
    spans: list[Span] = []
    keys = ranks.astype(np.int64) * len(TrackRole) + roles
    order = np.argsort(keys, kind="stable")
    for chosen in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        rank, place = divmod(int(keys[chosen[0]]), len(TrackRole))
        role = list(TrackRole)[place]
        known = newest.get(rank)
        rows: dict[int, int] = {}
        for index, row, start, end in place_spans(starts[chosen], (starts + lengths)[chosen]):
            if row not in rows:
                rows[row] = len(tracks)
                name = f"{_rank_name(rank, known)} {role}{f' {row + 1}' if row else ''}"
                worker = 0 if known is None else known.worker
                tracks.append(Track(process=worker, rank=rank, role=role, row=row, name=name))
            number, record = int(step_of[chosen[index]]), int(row_of[chosen[index]])
            places[number][record] = len(spans)
            spans.append(_span(source.steps[number], record, int(others[number][record]), (rows[row], start, end)))
    return tracks, spans, places


def _span(step: StoredStep, row: int, peer: int, place: tuple[int, int, int]) -> Span:
    record = step.view.records[row]
    kind = int(record["kind"])
    name = kind_name(kind)
    return Span(
        track=place[0],
        start_ns=place[1],
        end_ns=place[2],
        name=name if record["microbatch"] == NO_MICROBATCH else f"{name} {int(record['microbatch'])}",
        kind=kind,
        category=_CATEGORIES.get(kind, "span"),
        arguments=_arguments(step, record, peer),
    )


def _arguments(step: StoredStep, record: np.void, peer: int) -> dict[str, Argument]:
    flags, aux = int(record["flags"]), int(record["aux"])
    arguments: dict[str, Argument] = {
        "attempt": step.view.attempt,
        "step": step.view.step,
        "chunk": int(record["chunk"]),
    }
    if flags & Flag.AUX_BYTES:
        arguments["bytes"] = aux * BYTES_UNIT
    if flags & Flag.AUX_RUN_QUEUE:
        arguments["runQueueUs"] = aux * DURATION_UNIT_NS / 1000
    if flags & Flag.AUX_LEAD:
        arguments["launchLeadUs"] = aux * DURATION_UNIT_NS / 1000
    if flags & PassFlag.EARLY and int(record["kind"]) in PASS_KINDS:
        arguments["early"] = True
    if flags & Flag.INJECTED:
        arguments["injected"] = True
    if flags & Flag.SKIPPED_UPDATE and int(record["kind"]) == RecordKind.STEP:
        arguments["skippedUpdate"] = True
    if peer >= 0:
        arguments |= {"peer": peer, "ordinal": int(record["ordinal"])}
    elif int(record["kind"]) in COLLECTIVE_KINDS:
        group = step.view.comms.get(int(record["rank"]), {}).get(int(record["comm"]))
        if group is not None:
            arguments |= {"group": group_name(group), "ordinal": int(record["ordinal"])}
    return arguments | _part(record)


def _part(record: np.void) -> dict[str, Argument]:
    """Return what a span of a part of a pass is of; nothing of other spans."""
    site, layer = _SITES.get(int(record["ordinal"])), int(record["layer"])
    if int(record["kind"]) not in LAYER_KINDS or site is None:
        return {}
    return {"part": site} if layer == NO_LAYER else {"part": site, "layer": layer}


@functools.cache
def group_name(group: Communicator) -> str:
    """Return kind and members of a communicator, such as `dp 0-3,8`."""
    return f"{group.kind} {format_ranges(sorted(group.members))}"


def _curves(source: TraceSource, origin: int) -> Iterator[CounterTrack]:
    keys = {step.key for step in source.steps}
    offsets = {(ring.attempt, ring.rank): ring.real_offset_ns for ring in source.rings}
    found: dict[str, list[tuple[int, float]]] = {}
    for point in source.samples:
        offset = offsets.get((point.attempt, point.rank))
        if offset is not None and (point.attempt, point.step) in keys and math.isfinite(point.value):
            at = max(0, point.start_ns + offset - origin)
            found.setdefault(point.name, []).append((at, point.value))
    for name, points in found.items():
        yield CounterTrack(process=JOB_PROCESS, name=name, points=sorted(points))


def _counters(source: TraceSource, origin: int) -> Iterator[CounterTrack]:
    """Yield host and device counters of the workers within the time of the steps."""
    offsets = {ring.worker: ring.real_offset_ns for ring in source.rings}
    last = max(int(_starts(step).max()) for step in source.steps)
    found: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for sample in source.counters:
        at = sample.start_ns + offsets.get(sample.worker, 0)
        if origin <= at <= last and sample.counter in _COUNTERS:
            name = f"{Counter(sample.counter).name.lower()} {sample.device}"
            found.setdefault((sample.worker, name), []).append((at - origin, sample.value))
    for (worker, name), points in found.items():
        yield CounterTrack(process=worker, name=name, points=sorted(points))
