"""WebSocket admission: authenticate, authorize, take a slot, proxy; and close with a reason where one of them fails."""

import contextlib

from starlette.websockets import WebSocket

from megatronapp_common.names import CloseCode
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole
from megatronapp_operator.backends.kubernetes.client.errors import ApiError
from megatronapp_operator.gateway.access.authorization import Caller
from megatronapp_operator.gateway.access.subject_access import Verb
from megatronapp_operator.gateway.gateway import Gateway
from megatronapp_operator.gateway.job_catalog import CatalogJob
from megatronapp_operator.gateway.problems import count_error, of_api
from megatronapp_operator.gateway.proxy import websocket_proxy
from megatronapp_operator.gateway.proxy.websocket_proxy import SocketRules

CALLERS_SOCKETS, JOBS_SOCKETS = 16, 48
"""Live sockets of one caller, and of one job."""
Guest = tuple[Caller, CatalogJob, TokenRole]


async def serve_websocket(socket: WebSocket, gateway: Gateway, namespace: str, name: str, rules: SocketRules) -> None:
    """Let a page listen to the job's hub, as long as it may."""
    try:
        guest = await _admit(socket, gateway, namespace, name, rules)
        if rules.subprotocol is not None and rules.subprotocol not in socket.scope["subprotocols"]:
            hint = "Use the page of this release."
            raise HttpError(400, "other-protocol", f"this socket speaks {rules.subprotocol} alone", hint)
    except HttpError as refusal:
        count_error(socket, refusal)
        await socket.close(CloseCode.POLICY, websocket_proxy.reason_of(refusal))
        return

    async def check() -> None:
        if (await _admit(socket, gateway, namespace, name, rules))[2:] != guest[2:]:
            raise HttpError(403, "other-role", "your rights have changed", "Open the page again.")

    await socket.accept(rules.subprotocol)
    try:
        await _listen(socket, gateway, guest, rules, check)
    except (HttpError, ApiError) as error:
        why = error if isinstance(error, HttpError) else of_api(error)
        count_error(socket, why)
        await websocket_proxy.send_error(socket, why)


async def _admit(socket: WebSocket, gateway: Gateway, namespace: str, name: str, rules: SocketRules) -> Guest:
    """Return caller, job and role of a socket. Raises HttpError."""
    try:
        caller = await gateway.caller(socket)
        job = await gateway.gate.admit(caller, Verb.GET, namespace, name)
        role = await gateway.gate.role(caller, job) if rules.by_role else TokenRole.VIEWER
    except ApiError as error:
        raise of_api(error) from error
    return caller, job, role


async def _listen(
    socket: WebSocket, gateway: Gateway, guest: Guest, rules: SocketRules, check: websocket_proxy.Check
) -> None:
    caller, job, role = guest
    hub_name = f"hub of {job.namespace}/{job.name}"
    with gateway.sockets.acquire({caller.identity: CALLERS_SOCKETS, hub_name: JOBS_SOCKETS}):
        address = await gateway.hubs.address(job)
        async with contextlib.AsyncExitStack() as stack:
            with gateway.metrics.asking_hub():
                opened = websocket_proxy.listening(address, gateway.catalog.token(job, role), rules)
                hub = await stack.enter_async_context(opened)
            await websocket_proxy.proxy_frames(socket, hub, check, rules)
