"""Connection of one agent: HELLO, then the agent's frames, and commands in the other direction."""

import asyncio
import logging

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from megatronapp_analyzer.errors import LayoutError, ProtocolError
from megatronapp_analyzer.hub.http.access import AGENT_PATH, HubOf
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.state.agent_link import AgentLink
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import CloseCode

LOG = logging.getLogger(__name__)
PROTOCOL = 1
HELLO_TIMEOUT_S = 10.0

router = APIRouter()


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
        LOG.debug("an agent went away")


async def _receive(socket: WebSocket) -> bytes:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code") or 1005)
    data = message.get("bytes")
    if data is None:
        raise ProtocolError("text-message", "a text message came", "Send one frame per binary message.")
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
