"""The routes of MegaScope on rank 0 (docs/scope-protocol.md, section 6), as far as they need no capture."""

from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Path

from megatronapp_common.scope.protocol_requests import CaptureChange, Probe, RunRequest
from megatronapp_trainer.serve.model import new_seed
from megatronapp_trainer.serve.problems import ApiError
from megatronapp_trainer.serve.routes_openai import ANSWERS
from megatronapp_trainer.serve.schemas import Problem, Run, RunStarted
from megatronapp_trainer.serve.state import DeskOf, ModelOf, RunsOf

router = APIRouter(prefix="/scope/v1")
RunId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="12 hex digits")]
LATER: dict[int | str, dict[str, Any]] = {**ANSWERS, 501: {"model": Problem}}


@router.post("/runs", status_code=201, responses=LATER)
async def start(body: RunRequest, model: ModelOf, desk: DeskOf, runs: RunsOf) -> RunStarted:
    """Generate from some prompts."""
    run, seed = runs.new_id(), new_seed(body.sampling.seed)
    requests = await anyio.to_thread.run_sync(model.run_requests, body, run, seed)
    record = runs.start(run, body, seed, desk, requests)
    return RunStarted(run=run, position=record.ticket.position)


@router.get("/runs", responses=ANSWERS)
async def listed(runs: RunsOf) -> list[Run]:
    """The newest runs, newest first."""
    return [record.shown() for record in runs.newest_first()]


@router.get("/runs/{run}", responses=ANSWERS)
async def shown(run: RunId, runs: RunsOf) -> Run:
    """One run."""
    return runs.get(run).shown()


@router.delete("/runs/{run}", status_code=204, responses=ANSWERS)
async def cancel(run: RunId, runs: RunsOf, desk: DeskOf) -> None:
    """End a run; one that has ended already stays as it is."""
    desk.cancel(runs.get(run).ticket)


@router.patch("/runs/{run}", responses=ANSWERS)
async def change(run: RunId, body: CaptureChange, runs: RunsOf) -> Run:
    """Change what is captured of a run."""
    record = runs.get(run)
    record.capture = body.capture
    return record.shown()


@router.post("/probes", status_code=501, response_model=Problem, responses=LATER)
async def probe(body: Probe) -> None:
    """Read known tokens once more: not yet."""
    raise _later("probes")


def _later(what: str) -> ApiError:
    return ApiError(501, "not-yet", f"{what}: comes with a later release", hint="Leave it out.", param=what)
