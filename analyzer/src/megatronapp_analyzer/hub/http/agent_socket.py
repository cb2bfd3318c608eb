"""Connection of one agent: HELLO, then the agent's frames, and commands in the other direction."""

import asyncio
import logging
import time
from collections.abc import Callable

from fastapi import APIRouter
from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from megatronapp_analyzer.errors import LayoutError, ProtocolError
from megatronapp_analyzer.hub.http.access import AGENT_PATH, HubOf
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.state.agent_link import AgentLink
from megatronapp_analyzer.hub.state.totals import HubTotals
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import CloseCode
from megatronapp_common.web.problems import HttpError

LOG = logging.getLogger(__name__)
PROTOCOL = 1
HELLO_TIMEOUT_S = 10.0
LOG_S = 30.0
"""Least seconds between lines of the log about agents that the guard refuses, which try again every few seconds."""

router = APIRouter()


class AgentRefusals:
    """Count and log of agents that the guard refuses, as with a wrong token: their route never sees them."""

    def __init__(self, totals: HubTotals, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._now_s = now_s
        self._logged_s: float | None = None
        self._unlogged = 0

    def note(self, scope: Scope, error: HttpError) -> None:
        """Count a refused request if it is the connection of an agent."""
        if scope["type"] != "websocket" or scope["path"] != AGENT_PATH:
            return
        self._totals.protocol_errors += 1
        self._unlogged += 1
        now_s = self._now_s()
        if self._logged_s is not None and now_s - self._logged_s < LOG_S:
            return
        host, *_ = scope.get("client") or ("an unknown address",)
        LOG.warning("agent refused: %s, from %s; %d since the last such line", error, host, self._unlogged)
        self._logged_s, self._unlogged = now_s, 0


def parse_hello(frame: Frame, job: str, uid: str) -> AgentLink:
    """Return the agent that introduces itself. Raises ProtocolError if it belongs to another job."""
    header = frame.header
    if frame.type != FrameType.HELLO:
        raise ProtocolError("no-hello", f"the first frame is of type {frame.type}", "Send HELLO first.")
    if not frames.accepts(header.get("protocol"), PROTOCOL):
        raise ProtocolError("protocol", f"protocol {header.get('protocol')} is not {PROTOCOL}", "Use the same release.")
    if header.get("uid") != uid or header.get("job") != job:
        raise ProtocolError("other-job", f"this is the hub of {job} ({uid})", "Check the agent's environment.")
    try:
        return AgentLink(attempt=int(header["attempt"]), worker=int(header["worker"]), node=str(header.get("node", "")))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("bad-hello", f"HELLO: {type(error).__name__}: {error}") from error


@router.websocket(AGENT_PATH)
async def agent(socket: WebSocket, hub: HubOf) -> None:
    """Serve one agent until it disconnects. A protocol error is sent to it and ends the connection."""
    await socket.accept()
    try:
        await _converse(socket, hub)
    except (ProtocolError, FrameError, LayoutError) as error:
        hub.totals.protocol_errors += 1
        LOG.warning("agent refused: %s", error)
        await _refuse(socket, getattr(error, "code", "bad-frame"), str(error), getattr(error, "hint", ""))
    except WebSocketDisconnect:
        LOG.debug("an agent disconnected")


async def _receive(socket: WebSocket) -> bytes:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code") or 1005)
    data = message.get("bytes")
    if data is None:
        raise ProtocolError("text-message", "a text message was received", "Send one frame per binary message.")
    return bytes(data)


async def _receive_hello(socket: WebSocket) -> Frame:
    try:
        return frames.decode(await asyncio.wait_for(_receive(socket), HELLO_TIMEOUT_S))
    except TimeoutError as error:
        raise ProtocolError("no-hello", f"no HELLO within {HELLO_TIMEOUT_S:.0f} s", "Send HELLO first.") from error


async def _refuse(socket: WebSocket, code: str, message: str, hint: str) -> None:
    await socket.send_bytes(frames.encode_error(code, message, hint))
    await socket.close(CloseCode.POLICY, reason=code)


async def _converse(socket: WebSocket, hub: Hub) -> None:
    link = parse_hello(await _receive_hello(socket), hub.identity.name, hub.identity.uid)
    await socket.send_bytes(frames.encode(Frame(FrameType.WELCOME, hub.connect(link))))
    commands = asyncio.create_task(_send_commands(socket, link))
    try:
        while True:
            raw = await _receive(socket)
            hub.take_frame(link, frames.decode(raw), raw)
    finally:
        commands.cancel()
        hub.disconnect(link)


async def _send_commands(socket: WebSocket, link: AgentLink) -> None:
    while not link.replaced.is_set():
        page = await link.outbox.get()
        if page:
            await socket.send_bytes(frames.encode(Frame(FrameType.COMMAND, page)))
    await socket.close(CloseCode.REPLACED, reason="replaced")
