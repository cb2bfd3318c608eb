"""Passes a hub's live frames on to a page. The page only listens; of the hub only binary frames are taken."""

import asyncio
import contextlib
import logging
import socket
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable

import websockets.asyncio.client
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, WebSocketException

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_operator.door import protocols
from megatronapp_operator.door.problems import Refusal

LOG = logging.getLogger(__name__)
MAX_FRAME_BYTES = 4 << 20
"""Of one hub's frame: the format allows more, but all sockets of all hubs share the door's memory."""
SEND_S = 30.0
"""So long may a page take to read a frame."""
OPEN_S = 10.0
CLOSE_S = 5.0
LEAVE_S = 1.0
"""So long may a hub take to say goodbye: until then it holds memory."""
RECHECK_S = 30.0
CLOSE_POLICY, CLOSE_FAULT, CLOSE_AGAIN = 1008, 1011, 1012
"""WebSocket close codes (RFC 6455 and its registry): policy violation, internal error, service restart."""
MAX_REASON_BYTES = 123
Check = Callable[[], Awaitable[None]]


class _Direct(websockets.asyncio.client.connect):
    """A connection that no answer sends elsewhere."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Refuse to follow."""
        return exc


@contextlib.asynccontextmanager
async def listening(hub: str, token: str) -> AsyncIterator[websockets.asyncio.client.ClientConnection]:
    """The hub's live socket. Raises Refusal (502) if it cannot be opened."""
    try:
        connection = await _Direct(
            f"ws://{hub}/api/v1/live",
            sock=await _reach(hub),
            additional_headers={"Authorization": f"Bearer {token}"},
            proxy=None,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=0,
            open_timeout=OPEN_S,
            close_timeout=LEAVE_S,
        )
    except (WebSocketException, OSError, TimeoutError) as error:
        text = f"the job's hub does not open its live socket: {type(error).__name__}"
        raise Refusal(502, "hub-not-there", text, "It may be starting; the page tries again.") from error
    async with connection:
        yield connection


async def _reach(hub: str) -> socket.socket:
    """A connection to `host:port`. Raises OSError, TimeoutError."""
    parts = urllib.parse.urlsplit(f"//{hub}")
    host, port = str(parts.hostname), parts.port
    made = protocols.towards(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        async with asyncio.timeout(OPEN_S):
            await asyncio.get_running_loop().sock_connect(made, (host, port))
    except BaseException:
        made.close()
        raise
    return made


async def relay(page: WebSocket, hub: websockets.asyncio.client.ClientConnection, check: Check) -> None:
    """Pass frames on until one side ends, or `check`, which is asked every half minute, raises Refusal."""
    tasks = [asyncio.create_task(work) for work in (_pump(hub, page), _listen(page), _guard(check))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        code, reason = done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):  # it has gone, or still reads nothing
        async with asyncio.timeout(CLOSE_S):
            await page.close(code, reason)


async def _pump(hub: websockets.asyncio.client.ClientConnection, page: WebSocket) -> tuple[int, str]:
    try:
        async for message in hub:
            if isinstance(message, str):
                return CLOSE_FAULT, "the hub sent text"
            async with asyncio.timeout(SEND_S):
                await page.send_bytes(message)
    except TimeoutError:
        return CLOSE_POLICY, "the page does not read its frames"
    except ConnectionClosed as error:
        LOG.info("a hub's live socket broke off: %r", str(error)[:200])
    except (RuntimeError, WebSocketDisconnect):
        return CLOSE_AGAIN, ""
    return CLOSE_AGAIN, "the hub has ended the connection"


async def _listen(page: WebSocket) -> tuple[int, str]:
    while (await page.receive())["type"] != "websocket.disconnect":
        pass
    return CLOSE_AGAIN, ""


async def _guard(check: Check) -> tuple[int, str]:
    while True:
        await asyncio.sleep(RECHECK_S)
        try:
            await check()
        except Refusal as refusal:
            return CLOSE_POLICY, reason_of(refusal)


def reason_of(refusal: Refusal) -> str:
    """As much of the words as a close frame holds (123 bytes)."""
    return str(refusal).encode()[:MAX_REASON_BYTES].decode(errors="ignore")


async def say(page: WebSocket, refusal: Refusal) -> None:
    """Tell the page why there are no frames, in its own language, and close."""
    header = {"code": refusal.code, "message": str(refusal), "hint": refusal.hint}
    await page.send_bytes(frames.encode(Frame(FrameType.ERROR, header)))
    await page.close(CLOSE_AGAIN, refusal.code)
