"""The routes of MegaScope on rank 0 (docs/scope-protocol.md, section 6)."""

from typing import Annotated, cast

import anyio.to_thread
from fastapi import APIRouter, Depends, Path, Request, Response
from starlette.requests import HTTPConnection

from megatronapp_common.scope.analysis_requests import AnalysisRequest
from megatronapp_common.scope.protocol_requests import CaptureChange, ProbeRequest, RunRequest, ScoreRequest
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.dependencies import ModelOf
from megatronapp_trainer.serve.openai.routes_openai import ANSWERS
from megatronapp_trainer.serve.openai.schemas_completions import ProbeStarted, RunStarted, RunStatus, StreamEnd
from megatronapp_trainer.serve.scope.detached_runs import RunStore
from megatronapp_trainer.serve.scope.schemas import RunDetail
from megatronapp_trainer.serve.served_model import SEEDS, ServedModel, new_seed

router = APIRouter(prefix="/scope/v1")
RunId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="12 hex digits")]
SCORES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
FRAME = {"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}


def runs_of(connection: HTTPConnection) -> RunStore:
    """Return the runs of MegaScope."""
    return cast("RunStore", connection.app.state.runs)


RunsOf = Annotated[RunStore, Depends(runs_of)]


def run_requests(model: ServedModel, body: RunRequest, name: str, seed: int) -> list[GenerationRequest]:
    """Return one request for each prompt of a run. Raises HttpError, RequestError."""
    model.check_texts(len(body.prompts), model.most_prompts, "prompts")
    model.check_tokens(body.tokens, "tokens")
    sampling = body.sampling
    perturbation = model.perturbations.choose(body.perturbation)
    return [
        GenerationRequest(
            id=f"{name}-{sample}",
            prompt=model.ids_of(prompt),
            max_new_tokens=body.tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=(seed + sample) % SEEDS,
            stop_texts=sampling.stop,
            perturbation=perturbation,
            sample=sample,
        )
        for sample, prompt in enumerate(body.prompts)
    ]


@router.post("/runs", status_code=201, responses=ANSWERS)
async def start(body: RunRequest, model: ModelOf, runs: RunsOf) -> RunStarted:
    """Generate from one or more prompts."""
    run, seed = runs.new_id(), new_seed(body.sampling.seed)
    requests = await anyio.to_thread.run_sync(run_requests, model, body, run, seed)
    record = runs.start(run, body, seed, model, requests)
    return RunStarted(run=run, position=record.ticket.position)


@router.get("/runs", responses=ANSWERS)
async def listed(runs: RunsOf) -> list[RunStatus]:
    """List the newest runs, newest first."""
    return [record.shown() for record in runs.newest_first()]


@router.get("/runs/{run}", responses=ANSWERS)
async def shown(run: RunId, runs: RunsOf) -> RunDetail:
    """Return one run, with all tokens that were generated so far."""
    return runs.get(run).detail()


@router.delete("/runs/{run}", status_code=204, responses=ANSWERS)
async def cancel(run: RunId, runs: RunsOf) -> None:
    """End a run; one that has ended already is unchanged."""
    runs.cancel(run)


@router.patch("/runs/{run}", responses=ANSWERS)
async def change(run: RunId, body: CaptureChange, runs: RunsOf) -> RunStatus:
    """Change what is captured of a run, from the next step on."""
    return runs.change(run, body.capture).shown()


@router.post("/probes", responses=ANSWERS)
async def probe(body: ProbeRequest, model: ModelOf, runs: RunsOf) -> ProbeStarted:
    """Read known tokens once more, for exact numbers; the results are sent to the hub as PART frames."""
    return ProbeStarted(probe=await runs.probe(body, model))


@router.post("/scores", response_class=Response, responses={**ANSWERS, 200: SCORES})
async def scores(body: ScoreRequest, model: ModelOf, runs: RunsOf) -> Response:
    """Score the tokens of a text: a frame SCOPE_TOKENS with surprise, entropy and candidates of each."""
    return Response(await runs.scores(body, model), media_type="application/octet-stream")


@router.post("/analyses", response_class=Response, responses={**ANSWERS, 200: SCORES})
async def analyze(body: AnalysisRequest, model: ModelOf, runs: RunsOf) -> Response:
    """Analyze a text, which the model reads once more: a frame SCOPE_ANALYSIS (docs/scope-protocol.md, section 6)."""
    return Response(await runs.analyze(body, model), media_type="application/octet-stream")


@router.put("/basis", responses=ANSWERS, openapi_extra=FRAME)
async def basis(request: Request, model: ModelOf, runs: RunsOf) -> StreamEnd:
    """Project residual states on the axes of a frame SCOPE_BASIS."""
    runs.set_basis(await request.body())
    return StreamEnd()
