"""The timeline of one step, made from the records of the store."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.http.timeline import schemas
from megatronapp_analyzer.hub.ingest.digest import durations_ns
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.state.ranks import kind_name
from megatronapp_analyzer.hub.timeline.columns import StepColumns, columns_of
from megatronapp_analyzer.hub.timeline.windows import MAX_TRACKS, Bounds, rank_runs, select_window
from megatronapp_analyzer.model import JobLayout, RankRecords
from megatronapp_common.trace import BYTES_UNIT, DURATION_UNIT_NS, NO_MICROBATCH, Flag


def timeline(step: StoredStep, layout: JobLayout | None = None) -> schemas.Timeline:
    """Return all spans of one step as columns; `layout`: of its attempt, for the roles of its ranks."""
    columns = columns_of(step, layout)
    every = np.arange(len(columns.records))
    sends = np.flatnonzero(columns.receive_of >= 0)
    flows = np.stack([sends, columns.receive_of[sends]], axis=1)
    return _timeline(step, layout, columns, (every, flows), None)


def timeline_part(
    step: StoredStep, layout: JobLayout | None, columns: StepColumns, query: schemas.TimelineQuery, pixels: int
) -> schemas.Timeline:
    """Return the part of a step that a query describes."""
    bounds = Bounds(
        from_ns=_first_ns(columns, query),
        to_ns=max(columns.to_ns, (query.from_ns or 0) + 1) if query.to_ns is None else query.to_ns,
        pixels=pixels,
        first_track=query.first_track or 0,
        tracks=query.tracks or MAX_TRACKS,
        ranks=query.rank or None,
        span=query.span,
    )
    found = select_window(columns, bounds)
    tracks = min(bounds.tracks, max(0, len(columns.track_ranks) - bounds.first_track))
    if bounds.ranks is not None:
        tracks = int(np.isin(columns.track_ranks, bounds.ranks).sum())
    window = schemas.TimelineWindow(
        spans=int(columns.is_span.sum()),
        step_from_ns=columns.from_ns,
        step_to_ns=columns.to_ns,
        rank_runs=rank_runs(columns.track_ranks),
        from_ns=bounds.from_ns,
        to_ns=bounds.to_ns,
        first_track=bounds.first_track,
        tracks=tracks,
        pixels=found.pixels,
        place=_ints(found.places),
        merged=_ints(found.merged),
    )
    return _timeline(step, layout, columns, (found.places, found.flows), window)


def _first_ns(columns: StepColumns, query: schemas.TimelineQuery) -> int:
    """Return the begin of the part: that of the query, or of the step unless the query ends before it."""
    if query.from_ns is not None:
        return query.from_ns
    return columns.from_ns if query.to_ns is None else min(columns.from_ns, query.to_ns - 1)


def _timeline(
    step: StoredStep,
    layout: JobLayout | None,
    columns: StepColumns,
    chosen: tuple[NDArray[np.int64], NDArray[np.int64]],
    window: schemas.TimelineWindow | None,
) -> schemas.Timeline:
    """Return some spans of a step, given by their places, with the messages between them."""
    places, flows = chosen
    records, peer = columns.records[places], columns.peer[places]
    aux = records["aux"].astype(np.int64)
    return schemas.Timeline(
        attempt=step.view.attempt,
        step=step.view.step,
        origin_ns=columns.origin_ns,
        complete=step.digest.complete,
        ranks=_ints(np.unique(records["rank"])),
        roles=[] if layout is None else [role.value for role in layout.roles],
        kind_names={int(kind): kind_name(int(kind)) for kind in np.unique(records["kind"])},
        rank=_ints(records["rank"]),
        kind=_ints(records["kind"]),
        chunk=_ints(records["chunk"]),
        microbatch=_where(records["microbatch"] != NO_MICROBATCH, records["microbatch"]),
        start_ns=_ints(columns.starts_ns[places]),
        duration_ns=_ints(durations_ns(records)),
        flags=_ints(records["flags"]),
        run_queue_ns=_where(_flag(records, Flag.AUX_RUN_QUEUE), aux * DURATION_UNIT_NS),
        bytes=_where(_flag(records, Flag.AUX_BYTES), aux * BYTES_UNIT),
        peer=_where(peer >= 0, peer),
        flows=[(send, receive) for send, receive in flows.tolist()],
        window=window,
    )


def _where(chosen: NDArray[np.bool_], values: NDArray[Any]) -> list[int | None]:
    """Return values where `chosen`, null elsewhere."""
    return [int(value) if keep else None for keep, value in zip(chosen.tolist(), values.tolist(), strict=True)]


def _flag(records: RankRecords, flag: Flag) -> NDArray[np.bool_]:
    chosen: NDArray[np.bool_] = (records["flags"] & flag) != 0
    return chosen


def _ints(values: NDArray[Any]) -> list[int]:
    numbers: Sequence[int] = values.tolist()
    return list(numbers)
