"""MegaScope through the gateway (docs/scope-protocol.md): `get` on a job reads, `update` generates and pins."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Security, WebSocket
from starlette.responses import Response

from megatronapp_operator.gateway import websocket_admission
from megatronapp_operator.gateway.access.subject_access import Verb
from megatronapp_operator.gateway.gateway import MAX_BODY_BYTES
from megatronapp_operator.gateway.proxy import websocket_proxy
from megatronapp_operator.gateway.proxy.response_policy import ETAG
from megatronapp_operator.gateway.routes import (
    BEARER,
    HUB_PROBLEMS,
    OBJECT_BODY,
    PROBLEMS,
    CallerOf,
    HubPath,
    Name,
    Namespace,
    PathSegment,
    gateway_of,
)

JOB = "/jobs/{namespace}/{name}/scope"
MAX_RUN_BYTES = 1 << 20
"""Limit of the body of a new run: eight prompts of the longest kind."""
Answers = dict[int | str, dict[str, Any]]
RunId = Annotated[str, Path(max_length=64, pattern=f"^{PathSegment}$")]
Tag = Annotated[str | None, Header(alias="If-None-Match", max_length=200)]
CONTROLS: Answers = {200: {}, 201: {}, 202: {}, 204: {}, **HUB_PROBLEMS}
READ_RESPONSES: Answers = HUB_PROBLEMS | {
    200: {"content": {"application/json": {}, "application/octet-stream": {}, "text/csv": {}}},
    202: {},
    304: {"description": "not modified"},
}

router = APIRouter(prefix="/api/v1", dependencies=[Security(BEARER)], responses=PROBLEMS, tags=["scope"])
sockets = APIRouter(prefix="/api/v1")


@router.get(JOB, response_model=None, responses={200: {}, **HUB_PROBLEMS})
async def hello(request: Request, caller: CallerOf, namespace: Namespace, name: Name) -> Response:
    """The model of the job, and what the caller is: viewer or controller."""
    gateway = gateway_of(request)
    job = await gateway.gate.admit(caller, Verb.GET, namespace, name)
    return await gateway.forward_request(caller, job, "scope", role=await gateway.gate.role(caller, job))


@router.post(f"{JOB}/runs", response_model=None, openapi_extra=OBJECT_BODY, responses=CONTROLS)
async def start_run(request: Request, caller: CallerOf, namespace: Namespace, name: Name) -> Response:
    """Generate from some prompts."""
    return await _control(request, caller, (namespace, name), "runs", most=MAX_RUN_BYTES)


@router.patch(f"{JOB}/runs/{{run}}", response_model=None, openapi_extra=OBJECT_BODY, responses=CONTROLS)
async def change_run(request: Request, caller: CallerOf, namespace: Namespace, name: Name, run: RunId) -> Response:
    """Change the capture from the next step on."""
    return await _control(request, caller, (namespace, name), f"runs/{run}", most=MAX_BODY_BYTES)


@router.delete(f"{JOB}/runs/{{run}}", response_model=None, responses=CONTROLS)
async def cancel_run(request: Request, caller: CallerOf, namespace: Namespace, name: Name, run: RunId) -> Response:
    """End one run of the model."""
    return await _control(request, caller, (namespace, name), f"runs/{run}")


@router.post(f"{JOB}/runs/{{run}}/pca", response_model=None, openapi_extra=OBJECT_BODY, responses=CONTROLS)
async def refit(request: Request, caller: CallerOf, namespace: Namespace, name: Name, run: RunId) -> Response:
    """Compute new axes of the principal components of a layer."""
    return await _control(request, caller, (namespace, name), f"runs/{run}/pca", most=MAX_BODY_BYTES)


@router.post(f"{JOB}/comparisons", response_model=None, openapi_extra=OBJECT_BODY, responses=CONTROLS)
async def start_comparison(request: Request, caller: CallerOf, namespace: Namespace, name: Name) -> Response:
    """Generate two branches from one prompt, step by step, and compare them."""
    return await _control(request, caller, (namespace, name), "comparisons", most=MAX_RUN_BYTES)


@router.delete(f"{JOB}/comparisons/{{run}}", response_model=None, responses=CONTROLS)
async def cancel_comparison(
    request: Request, caller: CallerOf, namespace: Namespace, name: Name, run: RunId
) -> Response:
    """Cancel a comparison that waits or generates."""
    return await _control(request, caller, (namespace, name), f"comparisons/{run}")


@router.post(f"{JOB}/sweeps", response_model=None, openapi_extra=OBJECT_BODY, responses=CONTROLS)
async def start_sweep(request: Request, caller: CallerOf, namespace: Namespace, name: Name) -> Response:
    """Compare every cell of a matrix of perturbations with one reference."""
    return await _control(request, caller, (namespace, name), "sweeps", most=MAX_RUN_BYTES)


@router.delete(f"{JOB}/sweeps/{{run}}", response_model=None, responses=CONTROLS)
async def cancel_sweep(request: Request, caller: CallerOf, namespace: Namespace, name: Name, run: RunId) -> Response:
    """Cancel a sweep that waits or generates."""
    return await _control(request, caller, (namespace, name), f"sweeps/{run}")


@router.get(f"{JOB}/{{path:path}}", response_model=None, responses=READ_RESPONSES)
async def read_scope(
    *,
    request: Request,
    caller: CallerOf,
    namespace: Namespace,
    name: Name,
    path: HubPath,
    if_none_match: Tag = None,
) -> Response:
    """Read `/api/v1/scope/{path}` of the hub, with the same query: runs, tiles, exact numbers, sessions."""
    gateway = gateway_of(request)
    job = await gateway.gate.admit(caller, Verb.GET, namespace, name)
    tag = if_none_match if ETAG.fullmatch(if_none_match or "") else None
    return await gateway.forward_request(caller, job, f"scope/{path}", request.url.query, tag=tag)


@sockets.websocket(JOB)
async def scope_socket(socket: WebSocket, namespace: Namespace, name: Name) -> None:
    """The hub's frames of MegaScope, subprotocol `megatronapp.scope.1`."""
    await websocket_admission.serve_websocket(socket, gateway_of(socket), namespace, name, websocket_proxy.SCOPE_RULES)


async def _control(
    request: Request, caller: CallerOf, place: tuple[str, str], path: str, *, most: int | None = None
) -> Response:
    gateway = gateway_of(request)
    job = await gateway.gate.control(caller, *place)
    return await gateway.control_hub(caller, job, f"scope/{path}", request=request, most=most)
