"""One agent's connection: HELLO, then what it has to say, and commands the other way."""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from megatronapp_analyzer.errors import LayoutError, ProtocolError
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.room import SharedMemorySpace

if TYPE_CHECKING:
    from megatronapp_analyzer.hub.service import Hub

LOG = logging.getLogger(__name__)
PROTOCOL = 1
HELLO_TIMEOUT_S = 10.0
REFUSED = 1008
REPLACED = 4009
"""WebSocket close code (private range): the same worker has connected again."""


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class AgentLink:
    """A connected agent. Commands wait in `outbox`; only the newest one matters, so that it never grows."""

    attempt: int
    worker: int
    node: str
    outbox: "asyncio.Queue[Mapping[str, Any]]" = dataclasses.field(default_factory=lambda: asyncio.Queue(1))
    replaced: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    shared_memory: SharedMemorySpace | None = None
    """Shared memory of the worker, as its agent reported it last."""

    def command(self, page: Mapping[str, Any]) -> None:
        """Send this control page next, instead of one that still waits."""
        while not self.outbox.empty():
            self.outbox.get_nowait()
        self.outbox.put_nowait(page)

    def replace(self) -> None:
        """End this connection, because the same worker has a newer one."""
        self.replaced.set()
        self.command({})


def parse_hello(frame: Frame, job: str, uid: str) -> AgentLink:
    """The agent that introduces itself. Raises ProtocolError if it belongs elsewhere."""
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


async def serve(socket: WebSocket, hub: "Hub") -> None:
    """Talk to one agent until it goes. A protocol error is told and ends the connection."""
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
    problem = {"code": code, "message": message, "hint": hint}
    await socket.send_bytes(frames.encode(Frame(FrameType.ERROR, problem)))
    await socket.close(REFUSED, reason=code)


async def _converse(socket: WebSocket, hub: "Hub") -> None:
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
    await socket.close(REPLACED, reason="replaced")
