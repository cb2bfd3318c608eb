"""Open to everyone: probes and Prometheus."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from megatronapp_analyzer.hub.http import schemas
from megatronapp_analyzer.hub.http.access import HubOf

router = APIRouter()


@router.get("/healthz", operation_id="healthz")
async def healthz() -> schemas.Health:
    """Answer as long as the process runs."""
    return schemas.Health(status="ok")


@router.get("/readyz", operation_id="readyz", responses={503: {"model": schemas.Health}})
async def readyz(hub: HubOf, response: Response) -> schemas.Health:
    """The stored traces are read again and the analysis runs."""
    if not hub.ready:
        response.status_code = 503
        return schemas.Health(status="starting")
    return schemas.Health(status="ok")


@router.get("/metrics", operation_id="metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
