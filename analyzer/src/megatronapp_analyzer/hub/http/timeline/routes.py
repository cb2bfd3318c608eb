"""Route of the timeline of one step."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.http.history.views import find_step
from megatronapp_analyzer.hub.http.timeline import schemas, views
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.timeline.columns import ColumnsCache
from megatronapp_analyzer.model import JobLayout
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError

PROBLEM: dict[str, Any] = {"model": Problem}
PROBLEMS: dict[int | str, dict[str, Any]] = {401: PROBLEM, 404: PROBLEM, 422: PROBLEM, 503: PROBLEM}
BOUNDS = ("first_track", "tracks", "rank", "from_ns", "to_ns", "span", "whole_up_to")

router = APIRouter(prefix="/api/v1", responses=PROBLEMS)


@router.get("/timeline", operation_id="getTimeline", response_model=schemas.Timeline)
async def timeline(hub: HubOf, query: Annotated[schemas.TimelineQuery, Query()]) -> Response:
    """Spans of one step, in memory or stored, of the newest one if none is given: all, or with `pixels` a part."""
    _check(query)
    read = await find_step(hub, query.step, query.attempt)
    [found], omitted = read.steps, read.omitted
    state = hub.ingest.attempts.get(found.view.attempt)
    layout = None if state is None else state.layout
    written = await asyncio.to_thread(_write, found, layout, query, hub.timelines, omitted)
    return Response(written, media_type="application/json", headers={"Cache-Control": "no-store"})


def _check(query: schemas.TimelineQuery) -> None:
    """Raises HttpError for bounds that exclude each other."""
    given = [name for name in BOUNDS if getattr(query, name) not in (None, [])]
    if query.pixels is None and given:
        name = schemas.TimelineQuery.model_fields[given[0]].alias or given[0]
        raise HttpError(
            422,
            "pixels-missing",
            f"{name} bounds a part of a step, and pixels is absent",
            f"Add the width of the picture, pixels=1200, or leave {name} out for the whole step.",
        )
    if query.rank and (query.first_track is not None or query.tracks is not None):
        text = "tracks are given both by rank and by place"
        raise HttpError(422, "ranks-or-tracks", text, "Leave out rank, or firstTrack and tracks.")
    if query.from_ns is not None and query.to_ns is not None and query.to_ns <= query.from_ns:
        text = f"the part would end at {query.to_ns} ns, and it begins at {query.from_ns} ns"
        raise HttpError(422, "empty-window", text, "Give a toNs above fromNs.")


def _write(
    step: StoredStep, layout: JobLayout | None, query: schemas.TimelineQuery, cache: ColumnsCache, omitted: str | None
) -> bytes:
    """Return the answer as JSON: a large step would occupy the event loop."""
    is_whole = query.pixels is None
    if query.whole_up_to is not None:
        is_whole = len(step.view.records) <= query.whole_up_to
    if query.pixels is None or is_whole:
        view = views.timeline(step, layout)
    else:
        view = views.timeline_part(step, layout, cache.of(step, layout), query, query.pixels)
    view.omitted = omitted
    return view.model_dump_json(by_alias=True).encode()
