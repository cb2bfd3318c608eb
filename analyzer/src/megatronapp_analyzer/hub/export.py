"""Chrome trace JSON of steps: a process per worker, a thread per rank, arrows from sends to receives, faults, curves.

Perfetto and chrome://tracing open it. Times are microseconds after the first span (`ts`), whose real time is in the
metadata. Format: "Trace Event Format" of the Chromium project.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatronapp_analyzer.errors import ExportError
from megatronapp_analyzer.hub.ingest.curves import CurvePoint
from megatronapp_analyzer.hub.ingest.digest import durations_ns
from megatronapp_analyzer.hub.ingest.ingest import CounterSample, TraceIngest
from megatronapp_analyzer.hub.ingest.message_arrows import match_transfers, peers
from megatronapp_analyzer.hub.ingest.ring_metadata import RankRing
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.state.ranks import kind_name
from megatronapp_analyzer.model import RankRecords
from megatronapp_common.topology import RankRole
from megatronapp_common.trace import (
    BYTES_UNIT,
    DURATION_UNIT_NS,
    NO_MICROBATCH,
    PASS_KINDS,
    Counter,
    Flag,
    PassFlag,
    RecordKind,
)

Event = dict[str, Any]
Microseconds = np.ndarray[Any, np.dtype[np.float64]]
COUNTERS = frozenset(int(counter) for counter in Counter)
JOB_PID = 1_000_000
"""Process id of the curves, above any worker's index."""
CATEGORIES: dict[int, str] = {RecordKind.FAULT: "fault", RecordKind.STEP: "step", RecordKind.COPY: "copy"}
COLOURS: dict[int, str] = {RecordKind.FAULT: "terrible", RecordKind.RECV_WAIT: "grey", RecordKind.SEND_WAIT: "grey"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceSource:
    """Input of a trace. `rings` are those of the attempts that the steps belong to."""

    job: str
    rings: Sequence[RankRing]
    steps: Sequence[StoredStep]
    samples: Sequence[CurvePoint] = ()
    counters: Sequence[CounterSample] = ()


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


def chrome_trace(source: TraceSource) -> dict[str, Any]:
    """Build the trace document. Raises ExportError if `source` has no step."""
    if not source.steps:
        raise ExportError(f"job {source.job}: no step of that range is held; leave out --from and --to")
    origin = min(int(_starts(step).min()) for step in source.steps)
    events = [
        *_names(source),
        *(event for step in source.steps for event in _step_events(step, source.rings, origin)),
        *_curve_events(source, origin),
        *_counter_events(source, origin),
    ]
    keys = [list(step.key) for step in source.steps]
    metadata = {"job": source.job, "originRealTimeNs": str(origin), "firstStep": keys[0], "lastStep": keys[-1]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "metadata": metadata}


def _starts(step: StoredStep) -> "np.ndarray[Any, np.dtype[np.int64]]":
    records = step.view.records
    starts: np.ndarray[Any, np.dtype[np.int64]] = (
        records["start_ns"].astype(np.int64) + step.offsets_ns[records["rank"]]
    )
    return starts


def _meta(name: str, pid: int, tid: int | None, value: Mapping[str, Any]) -> Event:
    event: Event = {"ph": "M", "name": name, "pid": pid, "args": dict(value)}
    return event if tid is None else event | {"tid": tid}


def _names(source: TraceSource) -> Iterator[Event]:
    """Yield names and order of processes and threads; those of the newest attempt win."""
    newest = {ring.rank: ring for ring in sorted(source.rings, key=lambda ring: ring.attempt)}
    workers = {ring.worker: ring for ring in newest.values()}
    for worker, ring in sorted(workers.items()):
        yield _meta("process_name", worker, None, {"name": f"worker {worker} on {ring.node}"})
        yield _meta("process_sort_index", worker, None, {"sort_index": worker})
    for rank, ring in sorted(newest.items()):
        place = ring.coordinates
        role = "" if ring.role is RankRole.ALL else f"{ring.role} "
        name = f"{role}rank {rank} (pp {place.pp}, dp {place.dp}, tp {place.tp})"
        yield _meta("thread_name", ring.worker, rank, {"name": name})
        yield _meta("thread_sort_index", ring.worker, rank, {"sort_index": rank})
    yield _meta("process_name", JOB_PID, None, {"name": f"job {source.job}"})


def _workers(step: StoredStep, rings: Iterable[RankRing]) -> dict[int, int]:
    return {ring.rank: ring.worker for ring in rings if ring.attempt == step.view.attempt}


def _step_events(step: StoredStep, rings: Sequence[RankRing], origin: int) -> Iterator[Event]:
    records = step.view.records
    starts_us = (_starts(step) - origin) / 1000
    lengths_us = durations_ns(records) / 1000
    pids = _workers(step, rings)
    others = peers(step.view)
    for index, row in enumerate(records):
        rank, kind = int(row["rank"]), int(row["kind"])
        begin_us, length_us = float(starts_us[index]), float(lengths_us[index])
        event: Event = {
            "name": _span_name(row),
            "cat": CATEGORIES.get(kind, "span"),
            "pid": pids.get(rank, 0),
            "tid": rank,
            "ts": begin_us,
            "args": _arguments(step, row, int(others[index])),
        }
        if kind == RecordKind.COPY:  # overlaps the rank's spans and other copies: an asynchronous event
            event["id"] = f"{step.view.attempt}.{step.view.step}.copy.{index}"
            yield event | {"ph": "b"}
            yield event | {"ph": "e", "ts": begin_us + length_us}
        else:
            yield event | {"ph": "X", "dur": length_us} | _colour(kind)
    yield from _flow_events(step, pids, starts_us, lengths_us)


def _colour(kind: int) -> Event:
    colour = COLOURS.get(kind)
    return {"cname": colour} if colour else {}


def _span_name(row: np.void) -> str:
    name = kind_name(int(row["kind"]))
    return name if row["microbatch"] == NO_MICROBATCH else f"{name} {int(row['microbatch'])}"


def _arguments(step: StoredStep, row: np.void, peer: int) -> Event:
    flags, aux = int(row["flags"]), int(row["aux"])
    arguments: Event = {"attempt": step.view.attempt, "step": step.view.step, "chunk": int(row["chunk"])}
    if flags & Flag.AUX_BYTES:
        arguments["bytes"] = aux * BYTES_UNIT
    if flags & Flag.AUX_RUN_QUEUE:
        arguments["runQueueUs"] = aux * DURATION_UNIT_NS / 1000
    if flags & Flag.AUX_LEAD:
        arguments["launchLeadUs"] = aux * DURATION_UNIT_NS / 1000
    if flags & PassFlag.EARLY and int(row["kind"]) in PASS_KINDS:
        arguments["early"] = True
    if flags & Flag.INJECTED:
        arguments["injected"] = True
    if peer >= 0:
        arguments |= {"peer": peer, "ordinal": int(row["ordinal"])}
    return arguments


def _flow_events(
    step: StoredStep, pids: Mapping[int, int], starts_us: Microseconds, lengths_us: Microseconds
) -> Iterator[Event]:
    """Yield an arrow from the start of each send to the end of its receive."""
    records: RankRecords = step.view.records
    for number, (send, receive) in enumerate(match_transfers(step.view)):
        flow = {"name": "message", "cat": "p2p", "id": f"{step.view.attempt}.{step.view.step}.{number}"}
        source, target = int(records["rank"][send]), int(records["rank"][receive])
        yield flow | {"ph": "s", "pid": pids.get(source, 0), "tid": source, "ts": float(starts_us[send])}
        end_us = float(starts_us[receive] + lengths_us[receive])
        yield flow | {"ph": "f", "bp": "e", "pid": pids.get(target, 0), "tid": target, "ts": end_us}


def _curve_events(source: TraceSource, origin: int) -> Iterator[Event]:
    keys = {step.key for step in source.steps}
    offsets = {(ring.attempt, ring.rank): ring.real_offset_ns for ring in source.rings}
    for point in source.samples:
        offset = offsets.get((point.attempt, point.rank))
        if offset is not None and (point.attempt, point.step) in keys and math.isfinite(point.value):
            ts = (point.start_ns + offset - origin) / 1000
            yield {"ph": "C", "name": point.name, "pid": JOB_PID, "ts": ts, "args": {"value": point.value}}


def _counter_events(source: TraceSource, origin: int) -> Iterator[Event]:
    """Yield host and device counters of the workers within the time of the steps."""
    offsets = {ring.worker: ring.real_offset_ns for ring in source.rings}
    last = max(int(_starts(step).max()) for step in source.steps)
    for sample in source.counters:
        at = sample.start_ns + offsets.get(sample.worker, 0)
        if origin <= at <= last and sample.counter in COUNTERS:
            name = f"{Counter(sample.counter).name.lower()} {sample.device}"
            ts = (at - origin) / 1000
            yield {"ph": "C", "name": name, "pid": sample.worker, "ts": ts, "args": {"value": sample.value}}
