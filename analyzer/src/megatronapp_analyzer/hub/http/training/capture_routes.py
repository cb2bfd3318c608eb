"""Routes by which users read the captured steps of a training."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query

from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.http.training import capture_schemas as schemas
from megatronapp_analyzer.hub.http.training import capture_views as views
from megatronapp_analyzer.hub.http.training.views import captured_every
from megatronapp_analyzer.hub.state.capture_store import MAX_STEP
from megatronapp_analyzer.scope.routes import bounded
from megatronapp_common.scope.layer_statistics import MAX_NAME
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError

PROBLEM: dict[str, Any] = {"model": Problem}
PROBLEMS: dict[int | str, dict[str, Any]] = {401: PROBLEM, 422: PROBLEM, 429: PROBLEM}

router = APIRouter(prefix="/api/v1/training/captures", responses=PROBLEMS, dependencies=[Depends(bounded)])
StepNumber = Annotated[int, Path(ge=0, le=MAX_STEP)]
From = Annotated[int | None, Query(alias="from", ge=0, le=MAX_STEP, description="First step; all if absent.")]
To = Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Last step, included; the newest if absent.")]


@router.get("", operation_id="getCaptures")
async def captures(
    hub: HubOf,
    site: Annotated[str, Query(min_length=1, max_length=MAX_NAME)] = "residual",
    quantity: schemas.Quantity = "rms",
    first: From = None,
    to: To = None,
) -> schemas.Captures:
    """Statistics of layers over the captured steps: one quantity of one site. At most 256 steps, the newest."""
    store, every = hub.captures.store, captured_every(hub)
    return views.captures_view(store, site, quantity, first=first, last=to, every=every)


@router.get("/{step}", operation_id="getCapturedStep", responses={404: PROBLEM})
async def captured_step(hub: HubOf, step: StepNumber) -> schemas.CapturedStepDetails:
    """All statistics of one captured step, with histograms."""
    found = hub.captures.store.find(step)
    if found is None:
        raise HttpError(
            404,
            "not-captured",
            f"step {step} was not captured, or has been thinned out",
            "Choose a step that getCaptures lists.",
        )
    return views.details_view(found)
