"""The gateway's parts together: identifies callers, forwards their requests to hubs, and keeps to the limits."""

import contextlib

import aiohttp
from fastapi import Request
from starlette.requests import HTTPConnection
from starlette.responses import Response

from megatronapp_common.web.body_limit import read_body
from megatronapp_common.web.concurrency_limits import ConcurrencyLimits
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole
from megatronapp_operator.gateway.access.authorization import Authorizer, Caller
from megatronapp_operator.gateway.access.credentials import Credentials
from megatronapp_operator.gateway.job_catalog import CatalogJob, JobCatalog
from megatronapp_operator.gateway.metrics import GatewayMetrics
from megatronapp_operator.gateway.proxy import http_proxy
from megatronapp_operator.gateway.proxy.http_proxy import AT_ONCE, HubRequest
from megatronapp_operator.gateway.proxy.hub_addresses import HubAddresses
from megatronapp_operator.gateway.proxy.rate_limits import RateLimits
from megatronapp_operator.gateway.proxy.response_policy import response_rule_for

MAX_BODY_BYTES = 64 << 10
BODY_S = 10.0
"""Longest time in which a body must be received, in seconds: meanwhile it holds a slot of its caller and job."""
MAX_REQUESTS, CALLERS_REQUESTS, JOBS_REQUESTS, REQUESTS_OF_BOTH = 256, 32, AT_ONCE, 16
"""To hubs at the same time: in all, of one caller, to one job, and of one caller to one job."""
MAX_LONG_BODIES, CALLERS_LONG_BODIES = 32, 4
"""Concurrent bodies of more than MAX_BODY_BYTES: in all, and of one caller to one job."""
MAX_SOCKETS = 64
"""Live sockets in all. docs/gateway.md has the memory of each."""
CONTROLS, CONTROLS_S, JOBS_CONTROLS = 30, 15.0, 4
"""Controlling calls of one caller to one job: the burst, and the seconds in which it is refilled; all callers of one
role to one job have a multiple of it."""


class Gateway:
    """The state and the operations that all routes share."""

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
        self.requests = concurrency_limits("requests", MAX_REQUESTS)
        self.bodies = concurrency_limits("long bodies", MAX_LONG_BODIES)
        self.sockets = sockets
        self.reached = False
        """True once the cluster has answered."""
        self.controls = RateLimits("controlling calls", turns=controls, fill_s=CONTROLS_S)

    async def caller(self, connection: HTTPConnection) -> Caller:
        """Identify the caller. Raises HttpError (401, 403)."""
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
        """Forward a reading request to the job's hub. Raises HttpError."""
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
        """Forward a request that changes the job to its hub, with the request's body. Raises HttpError.

        The body is read only once the limits let it in.
        """
        role = await self.gate.role(caller, job)
        self.controls.acquire(rate_limit_keys(caller, job, role))
        with (
            self.requests.acquire(concurrency_keys(caller, job)) as share,
            self._concurrency_slot(caller, job, most or 0),
        ):
            body = None if most is None else await read_body(request.scope, request.receive, most, seconds=BODY_S)
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


def concurrency_limits(what: str, total: int) -> ConcurrencyLimits:
    """Return limits of things of a kind, whose error names the key."""

    def refuse(key: str, limit: int) -> HttpError:
        hint = "Close some pages, or try again in a moment."
        return HttpError(429, "too-many", f"{key} has {limit} {what} at once, and no more", hint)

    return ConcurrencyLimits("the gateway", total, refuse=refuse)


def concurrency_keys(caller: Caller, job: CatalogJob) -> dict[str, int]:
    """Return keys and limits of concurrent requests to a job's hub. No caller can use up those of a job."""
    whose, hub = caller.identity, hub_of(job)
    return {whose: CALLERS_REQUESTS, hub: JOBS_REQUESTS, f"{whose} at the {hub}": REQUESTS_OF_BOTH}


def rate_limit_keys(caller: Caller, job: CatalogJob, role: TokenRole) -> dict[str, int]:
    """Return keys and weights of a controlling call. Viewers cannot use up the rate of controllers."""
    hub = hub_of(job)
    return {f"{caller.identity} at the {hub}": 1, f"a {role} at the {hub}": JOBS_CONTROLS}


def hub_of(job: CatalogJob) -> str:
    """The job's hub, in words."""
    return f"hub of {job.namespace}/{job.name}"
