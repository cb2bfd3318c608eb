"""Answers of the HTTP interface, made from the state of the hub."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pydantic_core
from pydantic import ValidationError

from megatronapp_analyzer.hub.http import schemas
from megatronapp_analyzer.hub.http.training.capture_views import captures_summary
from megatronapp_analyzer.hub.http.training.views import captured_every, training_view
from megatronapp_analyzer.hub.ingest.digest import METRICS
from megatronapp_analyzer.hub.ingest.ring_metadata import RankRing
from megatronapp_analyzer.hub.ingest.store import in_range
from megatronapp_analyzer.hub.neighbours import NeighbourJob
from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.hub.state.ranks import RankState, RankStatus, kind_name
from megatronapp_analyzer.model import Cause
from megatronapp_common.trace import NO_MICROBATCH

HEATMAP_STEPS = 2000
"""Columns of a heat map at most: the newest of the range; a page has no more pixels."""
JsonNumber = float | None
SERVED = {"ready": "Running", "restarting": "Restarting"}
"""Phase of a job whose ranks have no rings, because they serve, by the state of its model."""


def phase(hub: HubReader) -> str:
    """Return the phase of the job as far as its hub can see; the operator knows better."""
    return _phase(hub, hub.ranks.states())


def _phase(hub: HubReader, states: Mapping[int, RankState]) -> str:
    if hub.ended is not None:
        return hub.ended.phase
    if not states:
        return SERVED.get(hub.scope.core.feed.state, "Pending")
    if all(state == RankState.ENDED for state in states.values()):
        done = hub.ranks.progress is not None and hub.ranks.progress.state == "done"
        return "Succeeded" if done else "Ended"
    pauses = hub.ranks.progress is not None and hub.ranks.progress.state == "paused"
    return "Running" if pauses or hub.ingest.store.recent(1) else "Starting"


def job_entry(hub: HubReader) -> schemas.JobEntry:
    """Return the job as an entry of a list."""
    job = hub.identity
    return schemas.JobEntry(name=job.name, namespace=job.namespace, phase=phase(hub), uid=job.uid)


def neighbour_entries(jobs: Iterable[NeighbourJob]) -> list[schemas.JobEntry]:
    """Return other jobs as entries of a list; a job whose status has values of other types is omitted."""
    entries = []
    for job in jobs:
        with contextlib.suppress(ValidationError):
            entries.append(schemas.JobEntry(here=False, **dataclasses.asdict(job)))
    return entries


def job_document(hub: HubReader) -> dict[str, Any]:
    """Return the state of the job and its ranks, as JobView writes it.

    Ranks are plain values from the start: a model of each of 10,000 ranks takes longer than the rest of an answer.
    """
    newest = hub.ingest.newest
    rings = newest.rings if newest else {}
    any_ring = next(iter(rings.values()), None)
    states = hub.ranks.states()
    view = schemas.JobView(
        name=hub.identity.name,
        namespace=hub.identity.namespace,
        uid=hub.identity.uid,
        # Ranks that serve have no rings, but publish; no attempt has begun before the first of them (-1).
        attempt=newest.attempt if newest else max(0, hub.scope.core.publishers.attempt),
        phase=_phase(hub, states),
        spec_digest=hub.identity.spec_digest,
        world_size=any_ring.world if any_ring else 0,
        layout=schemas.Layout(**dict(any_ring.layout) if any_ring else {}),
        ranks=[],
        faults=hub.faults.current(),
        tracer=tracer_health(hub),
        progress=hub.ranks.progress,
        gpu_hour_price=hub.identity.gpu_hour_price,
        training=training_view(hub),
        captures=captures_summary(hub.captures, captured_every(hub)),
        server_time=time.time(),
    )
    done = newest.assembler.newest if newest and newest.assembler else {}
    statuses = hub.ranks.statuses
    ranks = [rank_entry(ring, states[rank], statuses.get(rank), done.get(rank)) for rank, ring in sorted(rings.items())]
    return view.model_dump() | {"ranks": ranks}


def job_json(hub: HubReader) -> bytes:
    """Return the same as JSON."""
    return pydantic_core.to_json(job_document(hub), inf_nan_mode="null")


def snapshot(hub: HubReader) -> dict[str, Any]:
    """Return the header of a SNAPSHOT frame, without its time."""
    document = job_document(hub)
    del document["serverTime"]
    return document


def rank_entry(ring: RankRing, state: RankState, status: RankStatus | None, step: int | None) -> dict[str, Any]:
    """Return the state of one rank, as RankView writes it."""
    place = ring.coordinates
    return {
        "rank": ring.rank,
        "worker": ring.worker,
        "node": ring.node,
        "localRank": ring.local_rank,
        "tp": place.tp,
        "cp": place.cp,
        "ep": place.ep,
        "dp": place.dp,
        "pp": place.pp,
        "role": str(ring.role),
        "device": ring.device,
        "state": str(state),
        "step": step,
        "openSpan": open_span(status),
    }


def open_span(status: RankStatus | None) -> dict[str, Any] | None:
    """Return the span that a rank is inside of, as OpenSpan writes it."""
    span = status.liveness.open_span if status and not status.ended else None
    if status is None or span is None:
        return None
    return {
        "kind": kind_name(span.kind),
        "step": span.step,
        "microbatch": None if span.microbatch == NO_MICROBATCH else span.microbatch,
        "ageSeconds": round(status.open_span_age_s, 3),
    }


def tracer_health(hub: HubReader) -> schemas.TracerHealth:
    """Return how complete the trace is."""
    newest = hub.ingest.newest
    rings = len(newest.rings) if newest else 0
    lost = sum(hub.ingest.lost_by_worker().values())
    lag = hub.analysis.lag_s
    return schemas.TracerHealth(
        state="off" if not rings else "lossy" if lost else "ok",
        lost=lost,
        rings=rings,
        agents=len(hub.links),
        missing_ranks=newest.missing if newest else [],
        lag_seconds=None if lag is None else round(lag, 3),
    )


def verdicts(hub: HubReader) -> list[schemas.VerdictView]:
    """Return all verdicts, newest first."""
    return [schemas.VerdictView.model_validate(verdict) for verdict in verdict_documents(hub)]


def verdict_documents(hub: HubReader) -> list[dict[str, Any]]:
    """Return all verdicts, newest first, with their cost."""
    return [_with_cost(hub, verdict) for verdict in hub.verdicts.all()]


def _with_cost(hub: HubReader, verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a verdict with what all GPUs have lost to it, in three digits, as a status must not change each step.

    Those of the attempt in which it began, because a later attempt may have more or fewer.
    """
    lost_s = verdict["effect"].get("secondsLost")
    began = hub.ingest.attempts.get(verdict["since"]["attempt"])
    state = began if began is not None and began.rings else hub.ingest.newest
    if state is None or lost_s is None or verdict["cause"] == Cause.HANG:
        return verdict
    hours, price = float(f"{lost_s * state.devices / 3600:.3g}"), hub.identity.gpu_hour_price
    cost = None if price is None else float(f"{hours * price:.3g}")
    return verdict | {"effect": verdict["effect"] | {"gpuHours": hours, "cost": cost}}


def summary(hub: HubReader) -> schemas.Summary:
    """Return what the operator polls, with the reported verdicts that are not cleared; null without a detector."""
    newest, unknown = hub.ingest.newest, hub.analysis.is_out
    return schemas.Summary(
        attempt=newest.attempt if newest else 0,
        progress=hub.ranks.progress,
        slow_ranks=None if unknown else _slow_ranks(hub),
        hung_ranks=None if unknown else hub.verdicts.hung_ranks(),
        ranks=newest.world if newest else 0,
        tracer=tracer_health(hub),
        full_shared_memory=[
            schemas.SharedMemory(worker=link.worker, node=link.node, **link.shared_memory.to_json())
            for link in hub.links.values()
            if link.shared_memory is not None and link.shared_memory.full
        ],
        actions=[
            schemas.Action.model_validate(dataclasses.asdict(action)) for action in hub.scope.probe_client.actions.all()
        ],
    )


def _slow_ranks(hub: HubReader) -> list[schemas.VerdictView]:
    """Return the verdicts that were reported and are not cleared."""
    standing = [verdict.to_json() for verdict in hub.verdicts.standing()]
    return [schemas.VerdictView.model_validate(_with_cost(hub, verdict)) for verdict in standing]


def series(hub: HubReader, name: str, first: int | None, last: int | None) -> schemas.Series:
    """Return one curve; NaN and Inf become null."""
    points = [point for point in hub.ingest.curves.curve(name) if in_range(point.step, first, last)]
    return schemas.Series(
        name=name,
        attempts=[point.attempt for point in points],
        steps=[point.step for point in points],
        values=[point.value if math.isfinite(point.value) else None for point in points],
    )


def steps(hub: HubReader, first: int | None, last: int | None) -> list[schemas.StepView]:
    """Return finished steps, oldest first."""
    return [
        schemas.StepView(
            attempt=digest.attempt,
            step=digest.step,
            start_ns=digest.start_real_ns,
            duration_ns=digest.duration_ns,
            complete=digest.complete,
        )
        for digest in hub.ingest.store.digests(first, last)
    ]


def heatmap(hub: HubReader, metric: schemas.HeatmapMetric, first: int | None, last: int | None) -> schemas.Heatmap:
    """Return one metric, ranks by steps; attempts may differ in their number of ranks."""
    chosen = list(hub.ingest.store.digests(first, last))[-HEATMAP_STEPS:]
    world = max((digest.values.shape[1] for digest in chosen), default=0)
    table = np.full((world, len(chosen)), np.nan)
    for column, digest in enumerate(chosen):
        values = digest.values[METRICS.index(metric)]
        table[: len(values), column] = values
    return schemas.Heatmap(
        metric=metric,
        attempts=[digest.attempt for digest in chosen],
        steps=[digest.step for digest in chosen],
        ranks=list(range(world)),
        values=[_nullable(row) for row in np.round(table, 6).tolist()],  # at once: there may be 10,000 rows
    )


def _nullable(values: Iterable[float]) -> list[JsonNumber]:
    return [None if math.isnan(value) else value for value in values]
