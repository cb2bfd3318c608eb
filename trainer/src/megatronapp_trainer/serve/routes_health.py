"""Routes for health, readiness and metrics."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from megatronapp_trainer.serve.dependencies import BrokerOf
from megatronapp_trainer.serve.errors import NotReadyError
from megatronapp_trainer.serve.openai.schemas_completions import Health, Problem

router = APIRouter()
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/healthz")
async def healthz() -> Health:
    """Answer that the process is alive."""
    return Health(status="ok")


@router.get("/readyz", response_model=Health, responses={503: {"model": Health}})
async def readyz(broker: BrokerOf) -> Response:
    """Answer whether requests are accepted."""
    if (problem := broker.problem) is None:
        return JSONResponse({"status": "ok"})
    status = "starting" if isinstance(problem, NotReadyError) else "stopping"
    return JSONResponse({"status": status}, 503)


@router.get("/metrics", response_class=PlainTextResponse, responses={401: {"model": Problem}})
async def metrics(request: Request, broker: BrokerOf) -> Response:
    """Return the metrics in the text format of Prometheus."""
    waiting, running = broker.counts()
    return Response(broker.statistics.exposition(waiting=waiting, running=running), media_type=EXPOSITION)
