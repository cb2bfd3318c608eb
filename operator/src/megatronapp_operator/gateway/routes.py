"""The gateway's interface: the list of jobs, and what is below each job, which its hub answers."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Request, Security, WebSocket
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection
from starlette.responses import Response

from megatronapp_common.job.api.metadata import NAME_PATTERN
from megatronapp_common.web.models import Problem
from megatronapp_operator.gateway import websocket_admission
from megatronapp_operator.gateway.access.authorization import Caller
from megatronapp_operator.gateway.access.subject_access import Verb
from megatronapp_operator.gateway.gateway import MAX_BODY_BYTES, Gateway
from megatronapp_operator.gateway.job_catalog import CatalogJob
from megatronapp_operator.gateway.proxy import websocket_proxy
from megatronapp_operator.gateway.schemas import GatewayJob, Health, LoginTicket

PathSegment = r"[A-Za-z0-9_][A-Za-z0-9._~-]*"
Namespace = Annotated[str, Path(max_length=63, pattern=NAME_PATTERN)]
Name = Annotated[str, Path(max_length=63, pattern=NAME_PATTERN)]
HubPath = Annotated[str, Path(max_length=200, pattern=f"^{PathSegment}(/{PathSegment})*$")]
TrainingAction = Literal["lease", "orders"]
WindowId = Annotated[str, Path(max_length=100, pattern=f"^{PathSegment}$")]
FaultId = Annotated[str, Path(max_length=100, pattern=f"^{PathSegment}$")]
STATUSES = (400, 401, 403, 404, 408, 413, 422, 503)
FROM_HUB = (409, 429, 500, 502, 504)
PROBLEMS: dict[int | str, dict[str, Any]] = {status: {"model": Problem} for status in STATUSES}
HUB_PROBLEMS = PROBLEMS | {status: {"model": Problem} for status in FROM_HUB}
OBJECT_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}},
}
BEARER = HTTPBearer(auto_error=False, description="A token of the cluster, or a job's viewer token.")


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this connection."""
    gateway: Gateway = connection.app.state.gateway
    return gateway


async def _caller_of(connection: HTTPConnection) -> Caller:
    return await gateway_of(connection).caller(connection)


GatewayOf = Annotated[Gateway, Depends(gateway_of)]
CallerOf = Annotated[Caller, Depends(_caller_of)]
probes = APIRouter(tags=["probes"])
router = APIRouter(prefix="/api/v1", dependencies=[Security(BEARER)], responses=PROBLEMS)
sockets = APIRouter(prefix="/api/v1")


@probes.get("/healthz")
async def healthz() -> Health:
    """Answer that the process runs."""
    return Health(status="ok")


@probes.get("/readyz", responses={503: {"model": Problem}})
async def readyz(gateway: GatewayOf) -> Health:
    """Answer once the cluster has answered. Its later silence takes no page offline: requests report it."""
    if not gateway.reached:
        await gateway.catalog.reach()
        gateway.reached = True
    return Health(status="ok")


@router.get("/jobs")
async def jobs(gateway: GatewayOf, caller: CallerOf) -> list[GatewayJob]:
    """The jobs that the caller may see, by namespace and name."""
    return [entry(job) for job in await gateway.gate.visible(caller)]


@router.post("/tickets", status_code=201)
async def new_ticket(request: Request, gateway: GatewayOf, caller: CallerOf) -> LoginTicket:
    """Make a ticket that logs a browser in with the caller's rights, so that no token is part of an address."""
    return LoginTicket(ticket=gateway.credentials.ticket(request, caller))


@router.delete("/session", status_code=204)
async def log_out(request: Request, gateway: GatewayOf, caller: CallerOf) -> Response:
    """Log this browser out."""
    return gateway.credentials.log_out(request, Response(status_code=204))


@router.get("/jobs/{namespace}/{name}")
async def one_job(gateway: GatewayOf, caller: CallerOf, namespace: Namespace, name: Name) -> GatewayJob:
    """Return one job by namespace and name."""
    return entry(await gateway.gate.admit(caller, Verb.GET, namespace, name))


@router.post("/jobs/{namespace}/{name}/faults", status_code=201, openapi_extra=OBJECT_BODY, responses=HUB_PROBLEMS)
async def add_fault(
    request: Request, gateway: GatewayOf, caller: CallerOf, namespace: Namespace, name: Name
) -> Response:
    """Make a rank slow; the hub's own interface says how."""
    job = await gateway.gate.control(caller, namespace, name)
    return await gateway.control_hub(caller, job, "faults", request=request, most=MAX_BODY_BYTES)


@router.post(
    "/jobs/{namespace}/{name}/trace/windows", status_code=201, openapi_extra=OBJECT_BODY, responses=HUB_PROBLEMS
)
async def order_window(
    request: Request, gateway: GatewayOf, caller: CallerOf, namespace: Namespace, name: Name
) -> Response:
    """Record parts of passes of some steps; the hub's own interface says how."""
    job = await gateway.gate.control(caller, namespace, name)
    return await gateway.control_hub(caller, job, "trace/windows", request=request, most=MAX_BODY_BYTES)


@router.delete(
    "/jobs/{namespace}/{name}/trace/windows/{window}",
    response_model=None,
    responses={200: {}, 204: {}, **HUB_PROBLEMS},
)
async def cancel_window(
    request: Request, caller: CallerOf, namespace: Namespace, name: Name, window: WindowId
) -> Response:
    """Cancel a window of detailed spans of a job."""
    gateway = gateway_of(request)
    job = await gateway.gate.control(caller, namespace, name)
    return await gateway.control_hub(caller, job, f"trace/windows/{window}", request=request)


@router.delete(
    "/jobs/{namespace}/{name}/faults/{fault}", response_model=None, responses={200: {}, 204: {}, **HUB_PROBLEMS}
)
async def end_fault(request: Request, caller: CallerOf, namespace: Namespace, name: Name, fault: FaultId) -> Response:
    """End one fault of a job."""
    gateway = gateway_of(request)
    job = await gateway.gate.control(caller, namespace, name)
    return await gateway.control_hub(caller, job, f"faults/{fault}", request=request)


@router.post(
    "/jobs/{namespace}/{name}/training/{action}",
    response_model=None,
    openapi_extra=OBJECT_BODY,
    responses={200: {}, 202: {}, **HUB_PROBLEMS},
)
async def control_training(
    request: Request, caller: CallerOf, namespace: Namespace, name: Name, action: TrainingAction
) -> Response:
    """Take the control of a running training (`lease`), or give it an order (`orders`)."""
    gateway = gateway_of(request)
    job = await gateway.gate.control(caller, namespace, name)
    return await gateway.control_hub(caller, job, f"training/{action}", request=request, most=MAX_BODY_BYTES)


@router.get("/jobs/{namespace}/{name}/{path:path}", response_model=None, responses={200: {}, **HUB_PROBLEMS})
async def read_hub(request: Request, caller: CallerOf, namespace: Namespace, name: Name, path: HubPath) -> Response:
    """Read `/api/v1/{path}` of the job's hub: JSON, with the same query."""
    gateway = gateway_of(request)
    job = await gateway.gate.admit(caller, Verb.GET, namespace, name)
    return await gateway.forward_request(caller, job, path, request.url.query)


@sockets.websocket("/jobs/{namespace}/{name}/live")
async def live_socket(socket: WebSocket, namespace: Namespace, name: Name) -> None:
    """The hub's live frames."""
    await websocket_admission.serve_websocket(socket, gateway_of(socket), namespace, name, websocket_proxy.RULES)


def entry(job: CatalogJob) -> GatewayJob:
    """The job in a list."""
    status = job.status
    progress = status.get("progress") or {}
    return GatewayJob(
        namespace=job.namespace,
        name=job.name,
        uid=job.uid,
        phase=status.get("phase", "Pending"),
        iteration=progress.get("iteration"),
        total_iterations=progress.get("totalIterations"),
        restarts=status.get("restarts", 0),
        findings=[str(verdict.get("sentence", "")) for verdict in status.get("slowRanks", ())],
        hung_ranks=list(status.get("hungRanks", ())),
        created_at=job.document["metadata"]["creationTimestamp"],
    )
