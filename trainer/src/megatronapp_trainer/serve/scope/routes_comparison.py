"""The routes of comparisons on rank 0 (docs/scope-protocol.md, section 6)."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from megatronapp_common.scope.comparison_requests import ComparisonRequest, SweepRequest
from megatronapp_trainer.serve.dependencies import ModelOf
from megatronapp_trainer.serve.openai.routes_openai import ANSWERS
from megatronapp_trainer.serve.scope.routes_scope import SCORES, RunsOf
from megatronapp_trainer.serve.scope.schemas import ComparisonStarted, ListedComparison, ListedSweep, SweepStarted

router = APIRouter(prefix="/scope/v1")
ComparisonId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="12 hex digits")]


@router.post("/comparisons", status_code=201, responses=ANSWERS)
async def start(body: ComparisonRequest, model: ModelOf, runs: RunsOf) -> ComparisonStarted:
    """Generate two branches from a prompt, step by step, and compare them."""
    return ComparisonStarted(comparison=await runs.needed_comparisons().start(body, model))


@router.get("/comparisons", responses=ANSWERS)
async def listed(runs: RunsOf) -> list[ListedComparison]:
    """List the stored comparisons, newest first."""
    return runs.needed_comparisons().listed()


@router.get("/comparisons/{comparison}", response_class=Response, responses={**ANSWERS, 200: SCORES})
async def shown(comparison: ComparisonId, runs: RunsOf) -> Response:
    """Return a comparison so far: a frame SCOPE_ANALYSIS."""
    return Response(await runs.needed_comparisons().frame(comparison), media_type="application/octet-stream")


@router.delete("/comparisons/{comparison}", status_code=204, responses=ANSWERS)
async def cancel(comparison: ComparisonId, runs: RunsOf) -> None:
    """End a comparison; one that has ended already is unchanged."""
    runs.needed_comparisons().cancel(comparison)


@router.post("/sweeps", status_code=201, responses=ANSWERS)
async def start_sweep(body: SweepRequest, model: ModelOf, runs: RunsOf) -> SweepStarted:
    """Compare each cell of a matrix of perturbations with one reference."""
    return SweepStarted(sweep=await runs.needed_sweeps().start(body, model))


@router.get("/sweeps", responses=ANSWERS)
async def listed_sweeps(runs: RunsOf) -> list[ListedSweep]:
    """List the stored sweeps, newest first."""
    return runs.needed_sweeps().listed()


@router.get("/sweeps/{sweep}", response_class=Response, responses={**ANSWERS, 200: SCORES})
async def shown_sweep(sweep: ComparisonId, runs: RunsOf) -> Response:
    """Return a sweep so far: a frame SCOPE_ANALYSIS."""
    return Response(await runs.needed_sweeps().frame(sweep), media_type="application/octet-stream")


@router.delete("/sweeps/{sweep}", status_code=204, responses=ANSWERS)
async def cancel_sweep(sweep: ComparisonId, runs: RunsOf) -> None:
    """End a sweep; one that has ended already is unchanged."""
    runs.needed_sweeps().cancel(sweep)
