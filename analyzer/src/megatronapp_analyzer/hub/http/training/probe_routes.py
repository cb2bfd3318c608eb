"""Routes by which users follow probe texts over the steps of a training."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query

from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.http.training import probe_schemas as schemas
from megatronapp_analyzer.hub.http.training import probe_views as views
from megatronapp_analyzer.hub.state.capture_store import MAX_STEP
from megatronapp_analyzer.scope.routes import bounded
from megatronapp_common.scope.layer_statistics import MAX_LAYER
from megatronapp_common.scope.probe_limits import MAX_TEXTS
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError

PROBLEM: dict[str, Any] = {"model": Problem}
PROBLEMS: dict[int | str, dict[str, Any]] = {401: PROBLEM, 422: PROBLEM, 429: PROBLEM}
MISSING: dict[int | str, dict[str, Any]] = {404: PROBLEM}

router = APIRouter(prefix="/api/v1/training/probes", responses=PROBLEMS, dependencies=[Depends(bounded)])
StepNumber = Annotated[int, Path(ge=0, le=MAX_STEP)]
TextNumber = Annotated[int, Path(ge=0, lt=MAX_TEXTS)]


@router.get("", operation_id="getProbes")
async def probes(hub: HubOf) -> schemas.Probes:
    """Probe texts of the training, and the steps after which they were run."""
    return views.probes_view(hub.captures.texts)


@router.get("/{step}/{text}", operation_id="getProbeResult", responses=MISSING)
async def result(hub: HubOf, step: StepNumber, text: TextNumber) -> schemas.ProbeResult:
    """Predictions and norms of the residual of a text after a step."""
    found = views.result_view(hub.captures.texts, step, text)
    if found is None:
        raise _missing(step, text)
    return found


@router.get("/{step}/{text}/attention", operation_id="getProbeAttention", responses=MISSING)
async def attention(
    hub: HubOf,
    step: StepNumber,
    text: TextNumber,
    layer: Annotated[int, Query(ge=0, le=MAX_LAYER)] = 0,
    head: Annotated[int, Query(ge=0, le=MAX_LAYER)] = 0,
) -> schemas.ProbeAttention:
    """Attention of a head over a text after a step."""
    found = views.attention_view(hub.captures.texts, step, text, layer, head)
    if found is None:
        raise _missing(step, text)
    return found


def _missing(step: int, text: int) -> HttpError:
    return HttpError(
        404,
        "not-probed",
        f"there is nothing of this kind of text {text} after step {step}",
        "Choose steps, texts, layers and heads that getProbes lists.",
    )
