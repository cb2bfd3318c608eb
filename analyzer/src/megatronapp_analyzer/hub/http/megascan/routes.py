"""Routes by which users see what a job loses, to which ranks, and whether its trace is complete."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from megatronapp_analyzer.graph.usual import PeerSet
from megatronapp_analyzer.hub.blame.stored_step import default_peers, steps_before
from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.http.history.views import find_step
from megatronapp_analyzer.hub.http.megascan import schemas, views
from megatronapp_analyzer.hub.http.pipeline_view import choose_steps
from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError

PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem},
    422: {"model": Problem},
    503: {"model": Problem},
}
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem}}
COST_STEPS = 16
"""Newest steps in which the cost of tracing is measured."""

router = APIRouter(prefix="/api/v1", responses=PROBLEMS)

From = Annotated[int | None, Query(alias="from", ge=0, description="First step; all if absent.")]
To = Annotated[int | None, Query(ge=0, description="Last step, included; the newest if absent.")]
Peers = Annotated[
    PeerSet | None,
    Query(
        description="Operations that are expected to take equally long: `work`, those of a kind on one stage and "
        "chunk; `pooled`, all of a kind. If absent, `work` where a stage has several ranks."
    ),
]


@router.get("/slowdowns", operation_id="getSlowdowns")
async def slowdowns(hub: HubOf, first: From = None, to: To = None, peers: Peers = None) -> schemas.SlowdownsView:
    """Time that the newest whole steps lost, and to which ranks: at most 32 steps of the range."""
    chosen = choose_steps(hub, first, to)
    by = PeerSet.POOLED if chosen.layout is None else peers or default_peers(chosen.layout)

    def compute() -> schemas.SlowdownsView:
        return views.slowdowns_view(chosen.attempt, chosen.layout, chosen.steps, by, hub.graphs)

    newest = chosen.steps[-1].view.step if chosen.steps else None
    version = (chosen.attempt, newest, all(step.aligned for step in chosen.steps))
    return await hub.answers.answer(("slowdowns", first, to, by), version, compute)


@router.get("/blame", operation_id="getBlame", responses=NOT_FOUND)
async def blame(
    hub: HubOf,
    step: Annotated[int | None, Query(ge=0, description="The newest whole step if absent.")] = None,
    attempt: Annotated[int | None, Query(ge=0, description="Attempt; the newest with that step if absent.")] = None,
    peers: Peers = None,
) -> schemas.BlameView:
    """Time that one step lost: the culprit, the ranks that waited because of it, and the spans that show it."""
    read = await find_step(hub, _newest(hub) if step is None else step, attempt)
    [found], omitted = read.steps, read.omitted
    state = hub.ingest.attempts.get(found.view.attempt)  # None: only its steps are left, on the disk
    layout = None if state is None else state.layout
    if layout is None or omitted is not None:
        text = "its ranks have no places yet" if omitted is None else omitted
        raise HttpError(404, "no-graph", f"step {found.view.step}: {text}", "Ask for another step.")
    before = steps_before(hub.ingest.store, found)
    by = peers or default_peers(layout)
    view = await hub.answers.answer(
        ("blame", found.key, by),
        (len(found.view.records), found.aligned, [step.aligned for step in before]),
        lambda: views.blame_view(found, before, layout, by, hub.graphs),
    )
    if view is None:
        text = f"the records of step {found.view.step} make no graph"
        raise HttpError(404, "no-graph", text, "Ask for another step; records of this one are missing or out of order.")
    return view


def _newest(hub: HubReader) -> int | None:
    """Return the newest step that all ranks have delivered."""
    steps = choose_steps(hub, None, None).steps
    return steps[-1].view.step if steps else None


@router.get("/tracer", operation_id="getTracer")
async def tracer(hub: HubOf) -> schemas.TracerView:
    """Completeness, clocks and cost of the trace, by worker."""
    recent = [step for step in hub.ingest.store.newest(COST_STEPS) if step.digest.complete]
    return await hub.answers.run(lambda: views.tracer_view(hub, recent))
