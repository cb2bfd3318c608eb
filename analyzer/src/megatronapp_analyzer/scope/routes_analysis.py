"""HTTP of the analyses of MegaScope (docs/scope-protocol.md, section 8)."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from megatronapp_analyzer.scope import schemas_analysis
from megatronapp_analyzer.scope.routes import COMING, PROBLEMS, RunId, ScopeOf, bounded, coming, run_of
from megatronapp_analyzer.scope.service import ScopeService
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_analyzer.scope.views import lens_answer
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope.analysis_requests import MAX_CELLS, MAX_LENS_TOKENS, MAX_TOP
from megatronapp_common.web.problems import HttpError

ANALYSIS_WAIT_S = 1.0
DEFAULT_POSITIONS = 64
"""Positions that are read where none are named: the newest ones."""
LENS = COMING | {200: {"model": schemas_analysis.Lens, "content": {"text/csv": {"schema": {"type": "string"}}}}}
SpanText = Annotated[str | None, Query(pattern=r"^[0-9]{1,6}(-[0-9]{1,6})?$")]
Sample = Annotated[int, Query(ge=0, lt=1 << 20)]
TokenId = Annotated[int | None, Query(ge=0, lt=1 << 32)]

router = APIRouter(prefix="/api/v1/scope", responses=PROBLEMS, dependencies=[Depends(bounded)])


@router.get("/runs/{run}/lens", operation_id="getLens", response_class=Response, responses=LENS)
async def lens(
    *,
    scope: ScopeOf,
    run: RunId,
    sample: Sample = 0,
    positions: SpanText = None,
    layers: SpanText = None,
    top: Annotated[int, Query(ge=1, le=MAX_TOP)] = 5,
    token: TokenId = None,
    form: Annotated[lens_answer.LensFormat, Query(alias="format")] = "json",
) -> Any:  # noqa: ANN401
    """Logit lens: what each layer's residual predicts, through the final norm and the unembedding.

    `positions` and `layers` as `first-last`: by default the newest 64 positions and all layers. `token`: a token whose
    rank and log-probability are reported in each cell.
    """
    known = scope.whole(run_of(scope, run))
    scope.check_sample(known, sample)
    read = known.length(sample)
    first, end = _span("positions", positions, max(0, read - DEFAULT_POSITIONS), read)
    bottom, over = _span("layers", layers, 0, _layers_of(scope))
    _check_size((end - first) * (over - bottom), top)
    request = {
        "kind": "lens",
        "rows": [first, end],
        "layers": list(range(bottom, over)),
        "top": top,
        "token": token,
    }
    frame = await _analysis(scope, known, sample, request, min(end + 1, len(known.ids(sample))))
    if frame is None:
        return coming("lens")
    try:
        if form == "csv":
            data, media = await asyncio.to_thread(lens_answer.lens_csv, frame), "text/csv; charset=utf-8"
        else:
            fields = await asyncio.to_thread(lens_answer.lens_json, frame)
            answer = await asyncio.to_thread(lambda: schemas_analysis.Lens.model_validate(fields))
            data, media = answer.model_dump_json(by_alias=True).encode(), "application/json"
    except (FrameError, KeyError, TypeError) as error:
        raise HttpError(503, "model-failed", f"the model sent no lens: {error}", "See rank 0's log.") from error
    return Response(data, headers={"Cache-Control": "no-store"}, media_type=media)


async def _analysis(
    scope: ScopeService, run: ScopeRun, sample: int, request: dict[str, Any], count: int
) -> Frame | None:
    """Return the result of a request, None if it is still being computed. Raises HttpError."""
    return await scope.analyses.of(run, sample, request, count, ANALYSIS_WAIT_S)


def _layers_of(scope: ScopeService) -> int:
    model = scope.core.publishers.model
    if model is None:
        raise HttpError(503, "restarting", "the ranks have not connected yet", "Try again in a moment.")
    return int(model["layers"])


def _span(name: str, text: str | None, first: int, count: int) -> tuple[int, int]:
    """Return first and end of `first-last`; by default from `first` on. Raises HttpError for what does not exist."""
    if text is None:
        return first, count
    low, _, high = text.partition("-")
    start, last = int(low), int(high or low)
    if start > last:
        raise HttpError(422, "invalid-request", f"{name}: {start} is after {last}", "Write the smaller one first.")
    if last >= count:
        raise HttpError(404, "outside", f"{name}: there is no {last}", f"There are {count}, from 0; stay within them.")
    return start, last + 1


def _check_size(cells: int, top: int) -> None:
    if cells > MAX_CELLS or cells * top > MAX_LENS_TOKENS:
        raise HttpError(
            413,
            "too-large",
            f"{cells} cells of {top} tokens are more than one answer has",
            f"At most {MAX_CELLS} cells and {MAX_LENS_TOKENS} tokens; name fewer positions, layers or tokens.",
        )
