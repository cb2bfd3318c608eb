"""HTTP of comparisons of branches (docs/scope-protocol.md, section 8)."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Response, status

from megatronapp_analyzer.scope import schemas_comparison
from megatronapp_analyzer.scope.routes import (
    BODY,
    CONTROLLER,
    CONTROLS,
    NOT_FOUND,
    PROBLEM,
    PROBLEMS,
    ScopeOf,
    Who,
    bounded,
)
from megatronapp_analyzer.scope.views import comparison_answers, sweep_answers
from megatronapp_common.errors import FrameError
from megatronapp_common.scope.comparison_requests import ComparisonRequest, SweepRequest
from megatronapp_common.web.problems import HttpError

BranchId = Annotated[str, Path(max_length=64)]
TextFormat = Annotated[Literal["json", "csv"], Query(alias="format")]
CSV = {"text/csv": {"schema": {"type": "string"}}}
COMPARISON: dict[int | str, dict[str, Any]] = {
    **NOT_FOUND,
    200: {"model": schemas_comparison.Comparison, "content": CSV},
    503: PROBLEM,
}
SWEEP: dict[int | str, dict[str, Any]] = {
    **NOT_FOUND,
    200: {"model": schemas_comparison.Sweep, "content": CSV},
    503: PROBLEM,
}

router = APIRouter(prefix="/api/v1/scope", responses=PROBLEMS, dependencies=[Depends(bounded)])


@router.post(
    "/comparisons",
    operation_id="startComparison",
    status_code=status.HTTP_201_CREATED,
    responses=BODY,
    dependencies=CONTROLLER,
)
async def start(scope: ScopeOf, request: ComparisonRequest, who: Who) -> schemas_comparison.ComparisonAccepted:
    """Generate two branches from one prompt, step by step, and compare them."""
    body = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return schemas_comparison.ComparisonAccepted(comparison=await scope.comparisons.start(body, who))


@router.get("/comparisons", operation_id="listComparisons")
async def listed(scope: ScopeOf) -> list[schemas_comparison.ComparisonSummary]:
    """List the stored comparisons, newest first."""
    found = map(comparison_answers.comparison_summary, await scope.comparisons.newest_first())
    return [schemas_comparison.ComparisonSummary.model_validate(summary) for summary in found]


@router.get("/comparisons/{comparison}", operation_id="getComparison", response_class=Response, responses=COMPARISON)
async def shown(*, scope: ScopeOf, comparison: BranchId, heads: bool = False, form: TextFormat = "json") -> Any:  # noqa: ANN401
    """Return a comparison so far. Ask again while its state is queued or running.

    `heads`: with the change of each head, as JSON. `format=csv`: one line for each token.
    """
    frame = await scope.comparisons.get(comparison)

    def render() -> bytes:
        if form == "csv":
            return comparison_answers.comparison_csv(frame)
        answer = comparison_answers.comparison_json(frame, heads=heads)
        return schemas_comparison.Comparison.model_validate(answer).model_dump_json(by_alias=True).encode()

    return await rendered(render, form)


@router.delete(
    "/comparisons/{comparison}",
    operation_id="cancelComparison",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=CONTROLS,
    dependencies=CONTROLLER,
)
async def cancel(scope: ScopeOf, comparison: BranchId, who: Who) -> None:
    """Cancel a comparison that waits or generates; what has been compared stays."""
    await scope.comparisons.cancel(comparison, who)


@router.post(
    "/sweeps",
    operation_id="startSweep",
    status_code=status.HTTP_201_CREATED,
    responses=BODY,
    dependencies=CONTROLLER,
)
async def start_sweep(scope: ScopeOf, request: SweepRequest, who: Who) -> schemas_comparison.SweepAccepted:
    """Compare each cell of a matrix, layers by strengths or positions, with one reference."""
    body = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return schemas_comparison.SweepAccepted(sweep=await scope.sweeps.start(body, who))


@router.get("/sweeps", operation_id="listSweeps")
async def listed_sweeps(scope: ScopeOf) -> list[schemas_comparison.SweepSummary]:
    """List the stored sweeps, newest first."""
    found = map(sweep_answers.sweep_summary, await scope.sweeps.newest_first())
    return [schemas_comparison.SweepSummary.model_validate(summary) for summary in found]


@router.get("/sweeps/{sweep}", operation_id="getSweep", response_class=Response, responses=SWEEP)
async def shown_sweep(*, scope: ScopeOf, sweep: BranchId, form: TextFormat = "json") -> Any:  # noqa: ANN401
    """Return a sweep so far. Ask again while its state is queued or running. `format=csv`: the matrix."""
    frame = await scope.sweeps.get(sweep)

    def render() -> bytes:
        if form == "csv":
            return sweep_answers.sweep_csv(frame)
        answer = sweep_answers.sweep_json(frame)
        return schemas_comparison.Sweep.model_validate(answer).model_dump_json(by_alias=True).encode()

    return await rendered(render, form)


@router.delete(
    "/sweeps/{sweep}",
    operation_id="cancelSweep",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=CONTROLS,
    dependencies=CONTROLLER,
)
async def cancel_sweep(scope: ScopeOf, sweep: BranchId, who: Who) -> None:
    """Cancel a sweep; the cells that are known stay."""
    await scope.sweeps.cancel(sweep, who)


async def rendered(render: Callable[[], bytes], form: str) -> Response:
    """Return what `render` makes, in a thread. Raises HttpError for a frame that cannot be shown."""
    try:
        data = await asyncio.to_thread(render)
    except (FrameError, KeyError, TypeError, ValueError) as error:
        message = f"the model sent nothing that can be shown: {error}"
        raise HttpError(503, "model-failed", message, "See rank 0's log.") from error
    media = "text/csv; charset=utf-8" if form == "csv" else "application/json"
    return Response(data, headers={"Cache-Control": "no-store"}, media_type=media)
