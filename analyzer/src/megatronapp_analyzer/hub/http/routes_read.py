"""Routes for reading, by users, the operator and the page."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from megatronapp_analyzer.errors import ExportError
from megatronapp_analyzer.hub.archive.history import StepsRead
from megatronapp_analyzer.hub.export.around import steps_around
from megatronapp_analyzer.hub.export.formats import SUFFIXES, TraceFormat, spans_of_a_slice, trace_file
from megatronapp_analyzer.hub.export.tracks import source_of
from megatronapp_analyzer.hub.http import pipeline_view, role_view, schemas, views
from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.http.history.views import OMITTED_HEADER, select_steps
from megatronapp_analyzer.hub.service import Hub
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError

PROBLEMS: dict[int | str, dict[str, Any]] = {401: {"model": Problem}, 422: {"model": Problem}}
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem}}
BUSY: dict[int | str, dict[str, Any]] = {503: {"model": Problem}}
JSON, BYTES = "application/json", "application/octet-stream"
TRACE_STEPS = 50
"""Steps in a trace without `from`: the newest, because a browser opens some hundred thousand spans, not millions."""

router = APIRouter(prefix="/api/v1", responses=PROBLEMS)

From = Annotated[int | None, Query(alias="from", ge=0, description="First step; all if absent.")]
To = Annotated[int | None, Query(ge=0, description="Last step, included; the newest if absent.")]
AttemptOf = Annotated[int | None, Query(ge=0, description="Attempt; the newest with that step if absent.")]


@router.get("/jobs", operation_id="listJobs")
async def jobs(hub: HubOf) -> list[schemas.JobEntry]:
    """Jobs that this address knows: the hub's own, and on a laptop the others of this user."""
    own, others = views.job_entry(hub), hub.settings.neighbours
    return (
        [own] if others is None else [own, *views.neighbour_entries(await asyncio.to_thread(others.entries, own.uid))]
    )


@router.get("/job", operation_id="getJob", response_model=schemas.JobView)
async def job(hub: HubOf) -> Response:
    """State of the job and all its ranks."""
    return Response(views.job_json(hub), media_type=JSON)


@router.get("/summary", operation_id="getSummary", responses={503: {"model": Problem}})
async def summary(hub: HubOf) -> schemas.Summary:
    """Summarise the job for the operator; 503 while the detector starts, or judges the stored steps."""
    if not hub.analysis.caught_up and not hub.analysis.is_out:
        raise HttpError(
            503, "starting", "the detector is starting, or judges the stored steps", "Ask again in a second."
        )
    return views.summary(hub)


@router.get("/metrics/series", operation_id="getSeries")
async def series(hub: HubOf, name: schemas.SeriesName, first: From = None, to: To = None) -> schemas.Series:
    """Points of one curve."""
    return views.series(hub, name, first, to)


@router.get("/steps", operation_id="listSteps")
async def steps(hub: HubOf, first: From = None, to: To = None) -> list[schemas.StepView]:
    """Finished steps, oldest first."""
    return views.steps(hub, first, to)


@router.get("/heatmap", operation_id="getHeatmap")
async def heatmap(
    hub: HubOf, metric: schemas.HeatmapMetric = "slowdown", first: From = None, to: To = None
) -> schemas.Heatmap:
    """Return a heat map of ranks by steps."""
    return views.heatmap(hub, metric, first, to)


@router.get("/pipeline", operation_id="getPipeline")
async def pipeline(hub: HubOf, first: From = None, to: To = None) -> schemas.PipelineView:
    """Plans of MegaDPP, and length, idle share, early passes and transfers of the newest whole steps."""
    chosen = pipeline_view.choose_steps(hub, first, to)
    return await asyncio.to_thread(pipeline_view.pipeline_view, chosen, hub.passes)


@router.get("/forward-backward", operation_id="getForwardBackward")
async def forward_backward(hub: HubOf, first: From = None, to: To = None) -> schemas.ForwardBackwardView:
    """Forward and backward ranks of MegaFBD: how busy they are, their passes and waits, and the shipments."""
    chosen = pipeline_view.choose_steps(hub, first, to)
    state = hub.ranks.forward_backward()
    return await asyncio.to_thread(role_view.forward_backward_view, chosen, state, hub.roles, hub.passes)


@router.get("/verdicts", operation_id="listVerdicts")
async def verdicts(hub: HubOf) -> list[schemas.VerdictView]:
    """All verdicts, newest first."""
    return views.verdicts(hub)


_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A Chrome trace, or with `format=perfetto` a trace of Perfetto.",
        "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.get("/trace", operation_id="getTrace", response_model=schemas.TraceDocument, responses=NOT_FOUND | BUSY | _FILE)
async def trace(
    hub: HubOf,
    first: From = None,
    to: To = None,
    format_: Annotated[TraceFormat, Query(alias="format")] = TraceFormat.CHROME,
    verdict: Annotated[str | None, Query(description="Only about 1 MB around the evidence of this verdict.")] = None,
) -> Response:
    """Trace of steps in memory, with `from` also of stored ones, with arrows from sends to receives."""
    read = await _steps_of_a_trace(hub, (first, to), format_, verdict)
    chosen, omitted = read.steps, read.omitted
    name = f"{hub.identity.name}{'' if verdict is None else '-verdict'}{SUFFIXES[format_]}"
    try:
        written = await asyncio.to_thread(trace_file, source_of(hub.ingest, hub.identity.name, chosen), format_)
    except ExportError as error:
        raise HttpError(422, "too-many-spans", str(error), "Take fewer steps with from and to.") from error
    headers = {"Cache-Control": "no-store"} | ({} if omitted is None else {OMITTED_HEADER: omitted})
    if format_ is TraceFormat.PERFETTO:
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return Response(written, media_type=BYTES if format_ is TraceFormat.PERFETTO else JSON, headers=headers)


async def _steps_of_a_trace(
    hub: Hub, steps: tuple[int | None, int | None], format_: TraceFormat, verdict: str | None
) -> StepsRead:
    """Return the steps that a trace shows. Raises HttpError where none are stored, or the verdict is not known."""
    if verdict is None:
        first, last = steps
        if first is None:
            chosen = StepsRead(hub.ingest.store.select(None, last, newest=TRACE_STEPS), None)
        else:
            chosen = await select_steps(hub, first, last)
        if not chosen.steps:
            hint = "GET /api/v1/history says which are; or leave out from and to."
            raise HttpError(404, "step-not-held", "no step of that range is stored", hint)
        return chosen
    if steps != (None, None):
        text = "the steps of a trace around a verdict are chosen by the verdict"
        raise HttpError(422, "verdict-or-steps", text, "Leave out from and to, or the verdict.")
    found = hub.verdicts.find(verdict)
    if found is None:
        raise HttpError(404, "no-verdict", f"verdict {verdict[:80]!r} is not known", "GET /api/v1/verdicts lists all.")
    try:
        return StepsRead(steps_around(hub.ingest.store, found, spans_of_a_slice(format_)), None)
    except ExportError as error:
        raise HttpError(404, "step-not-held", str(error), "Take newer steps with from and to.") from error
