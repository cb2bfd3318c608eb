"""The gateway's interface: the list of jobs, and what is below each job, which its hub answers."""

import contextlib
from typing import Annotated, Any

import aiohttp
from fastapi import APIRouter, Depends, Path, Request, Security, WebSocket
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection
from starlette.responses import Response

from megatronapp_common.job.api.metadata import NAME_PATTERN
from megatronapp_common.web.tokens import TokenRole
from megatronapp_operator.gateway import http_proxy, websocket_admission, websocket_proxy
from megatronapp_operator.gateway.authorization import Authorizer, Caller
from megatronapp_operator.gateway.concurrency_limits import ConcurrencyLimits
from megatronapp_operator.gateway.credentials import Credentials
from megatronapp_operator.gateway.http_proxy import AT_ONCE, HubRequest
from megatronapp_operator.gateway.hub_addresses import HubAddresses
from megatronapp_operator.gateway.job_catalog import CatalogJob, JobCatalog
from megatronapp_operator.gateway.metrics import GatewayMetrics
from megatronapp_operator.gateway.rate_limits import RateLimits
from megatronapp_operator.gateway.response_policy import response_rule_for
from megatronapp_operator.gateway.schemas import GatewayJob, Health, LoginTicket, Problem
from megatronapp_operator.gateway.static_pages import read_body
from megatronapp_operator.gateway.subject_access import Verb

MAX_BODY_BYTES = 64 << 10
MAX_REQUESTS, CALLERS_REQUESTS, JOBS_REQUESTS, REQUESTS_OF_BOTH = 256, 32, AT_ONCE, 16
"""To hubs at the same time: in all, of one caller, to one job, and of one caller to one job."""
MAX_LONG_BODIES, CALLERS_LONG_BODIES = 32, 4
"""Bodies of more than MAX_BODY_BYTES that may come at the same time: in all, and of one caller to one job."""
MAX_SOCKETS = 64
"""Live sockets in all. What one may take of memory stands in docs/gateway.md."""
CONTROLS, CONTROLS_S, JOBS_CONTROLS = 30, 15.0, 4
"""Controlling calls of one caller to one job: so many at once, and as many more in so many seconds; those of all
callers of one role to one job so many times as often."""
PathSegment = r"[A-Za-z0-9][A-Za-z0-9._~-]*"
Namespace = Annotated[str, Path(max_length=63, pattern=NAME_PATTERN)]
Name = Annotated[str, Path(max_length=63, pattern=NAME_PATTERN)]
HubPath = Annotated[str, Path(max_length=200, pattern=f"^{PathSegment}(/{PathSegment})*$")]
FaultId = Annotated[str, Path(max_length=100, pattern=f"^{PathSegment}$")]
STATUSES = (400, 401, 403, 404, 408, 413, 422, 503)
FROM_HUB = (409, 429, 500, 502, 504)
PROBLEMS: dict[int | str, dict[str, Any]] = {status: {"model": Problem} for status in STATUSES}
HUB_PROBLEMS = PROBLEMS | {status: {"model": Problem} for status in FROM_HUB}
OBJECT_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}},
}
BEARER = HTTPBearer(auto_error=False, description="A token of the cluster, or a job's viewer token.")


class Gateway:
    """What the routes work with."""

    def __init__(
        self,
        *,
        catalog: JobCatalog,
        gate: Authorizer,
        hubs: HubAddresses,
        credentials: Credentials,
        session: aiohttp.ClientSession,
        metrics: GatewayMetrics,
        sockets: ConcurrencyLimits,
        controls: int = CONTROLS,
    ) -> None:
        self.catalog = catalog
        self.gate = gate
        self.hubs = hubs
        self.credentials = credentials
        self.session = session
        self.metrics = metrics
        self.requests = ConcurrencyLimits("requests", in_all=MAX_REQUESTS)
        self.bodies = ConcurrencyLimits("long bodies", in_all=MAX_LONG_BODIES)
        self.sockets = sockets
        self.reached = False
        """Whether the cluster has answered once."""
        self.controls = RateLimits("controlling calls", turns=controls, fill_s=CONTROLS_S)

    async def caller(self, connection: HTTPConnection) -> Caller:
        """Who asks. Raises Refusal (401, 403)."""
        return await self.gate.identify(self.credentials.tokens(connection))

    async def forward_request(
        self,
        caller: Caller,
        job: CatalogJob,
        path: str,
        query: str = "",
        *,
        role: TokenRole = TokenRole.VIEWER,
        tag: str | None = None,
    ) -> Response:
        """What the job's hub tells. Raises Refusal."""
        url = http_proxy.address_of(await self.hubs.address(job), path, query)
        token, who = (
            self.catalog.token(job, role),
            self.catalog.alias(job, caller.identity),
        )  # hubs share out by callers
        question = HubRequest(url=url, token=token, who=who, tag=tag, kind=response_rule_for(path, query))
        with self.requests.acquire(concurrency_keys(caller, job)) as share:
            return await self._send_request(question, share)

    async def control_hub(
        self, caller: Caller, job: CatalogJob, path: str, *, request: Request, most: int | None = None
    ) -> Response:
        """What the job's hub says to something that changes its job, with the request's body. Raises Refusal.

        Nothing of a body is read before there is room for it.
        """
        role = await self.gate.role(caller, job)
        self.controls.acquire(rate_limit_keys(caller, job, role))
        with (
            self.requests.acquire(concurrency_keys(caller, job)) as share,
            self._concurrency_slot(caller, job, most or 0),
        ):
            body = None if most is None else await read_body(request, most)
            url = http_proxy.address_of(await self.hubs.address(job), path, "")
            who = caller.name if role is TokenRole.CONTROLLER else None
            token = self.catalog.token(job, role)
            return await self._send_request(
                HubRequest(url=url, token=token, method=request.method, body=body, who=who), share
            )

    def _concurrency_slot(self, caller: Caller, job: CatalogJob, most: int) -> contextlib.ExitStack:
        if most <= MAX_BODY_BYTES:
            return contextlib.ExitStack()
        return self.bodies.acquire({f"{caller.identity} at the {hub_of(job)}": CALLERS_LONG_BODIES})

    async def _send_request(self, question: HubRequest, share: contextlib.ExitStack) -> Response:
        with self.metrics.asking_hub():
            answer = await http_proxy.send_request(self.session, question)
        answer.share = share.pop_all()
        return answer


def concurrency_keys(caller: Caller, job: CatalogJob) -> dict[str, int]:
    """Of whose shares a request to a job's hub takes. No caller can fill those of a job."""
    whose, hub = caller.identity, hub_of(job)
    return {whose: CALLERS_REQUESTS, hub: JOBS_REQUESTS, f"{whose} at the {hub}": REQUESTS_OF_BOTH}


def rate_limit_keys(caller: Caller, job: CatalogJob, role: TokenRole) -> dict[str, int]:
    """Of whose turns a controlling call takes. No viewer, who may make ranks slow, can use up those of controllers."""
    hub = hub_of(job)
    return {f"{caller.identity} at the {hub}": 1, f"a {role} at the {hub}": JOBS_CONTROLS}


def hub_of(job: CatalogJob) -> str:
    """The job's hub, in words."""
    return f"hub of {job.namespace}/{job.name}"


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
    """The process answers."""
    return Health(status="ok")


@probes.get("/readyz", responses={503: {"model": Problem}})
async def readyz(gateway: GatewayOf) -> Health:
    """The cluster has answered once. Later its silence takes no page away: requests that need it say so themselves."""
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
    """A word that logs a browser in with the caller's rights, so that no token stands in an address."""
    return LoginTicket(ticket=gateway.credentials.ticket(request, caller))


@router.delete("/session", status_code=204)
async def log_out(request: Request, gateway: GatewayOf, caller: CallerOf) -> Response:
    """Forget this browser."""
    return gateway.credentials.log_out(request, Response(status_code=204))


@router.get("/jobs/{namespace}/{name}")
async def one_job(gateway: GatewayOf, caller: CallerOf, namespace: Namespace, name: Name) -> GatewayJob:
    """One job."""
    return entry(await gateway.gate.admit(caller, Verb.GET, namespace, name))


@router.post("/jobs/{namespace}/{name}/faults", status_code=201, openapi_extra=OBJECT_BODY, responses=HUB_PROBLEMS)
async def add_fault(
    request: Request, gateway: GatewayOf, caller: CallerOf, namespace: Namespace, name: Name
) -> Response:
    """Make a rank slow; the hub's own interface says how."""
    job = await gateway.gate.admit(caller, Verb.UPDATE, namespace, name)
    return await gateway.control_hub(caller, job, "faults", request=request, most=MAX_BODY_BYTES)


@router.delete(
    "/jobs/{namespace}/{name}/faults/{fault}", response_model=None, responses={200: {}, 204: {}, **HUB_PROBLEMS}
)
async def end_fault(request: Request, caller: CallerOf, namespace: Namespace, name: Name, fault: FaultId) -> Response:
    """End a fault."""
    gateway = gateway_of(request)
    job = await gateway.gate.admit(caller, Verb.UPDATE, namespace, name)
    return await gateway.control_hub(caller, job, f"faults/{fault}", request=request)


@router.get("/jobs/{namespace}/{name}/{path:path}", response_model=None, responses={200: {}, **HUB_PROBLEMS})
async def read_hub(request: Request, caller: CallerOf, namespace: Namespace, name: Name, path: HubPath) -> Response:
    """What the job's hub tells at `/api/v1/{path}`: JSON, with the same query."""
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
