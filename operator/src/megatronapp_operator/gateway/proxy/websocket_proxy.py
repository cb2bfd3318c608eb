"""Passes a hub's frames on to a page, and what the page may say to the hub. Of the hub only binary frames are taken."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable

import websockets.asyncio.client
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol

from megatronapp_common import frames
from megatronapp_common.frames import PREFIX, FrameType
from megatronapp_common.names import CloseCode
from megatronapp_common.scope.protocol import MAX_MESSAGE_BYTES, SUBPROTOCOL
from megatronapp_common.web.loopback import family_of
from megatronapp_common.web.problems import HttpError
from megatronapp_operator.gateway.proxy.hub_addresses import hub_socket

LOG = logging.getLogger(__name__)
MAX_FRAME_BYTES = 4 << 20
"""Limit of one hub's frame: the format allows more, but all sockets of all hubs share the gateway's memory."""
SEND_S = 30.0
"""So long may a page take to read a frame."""
OPEN_S = 10.0
CLOSE_S = 5.0
LEAVE_S = 1.0
"""So long may a hub take to say goodbye: until then it holds memory."""
RECHECK_S = 30.0
MAX_REASON_BYTES = 123
PASSED_CODES = frozenset({CloseCode.POLICY, CloseCode.TOO_SLOW})
"""A hub's close codes that a page understands; after any other it connects again."""
TEXT_S = 10.0
"""So long may a hub take to read what a page says."""
Check = Callable[[], Awaitable[None]]
Hub = websockets.asyncio.client.ClientConnection


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SocketRules:
    """Properties of one of the hub's sockets."""

    path: str
    subprotocol: Subprotocol | None = None
    by_role: bool = False
    """True if the hub needs the page's role, and receives its messages."""
    most: int = MAX_FRAME_BYTES
    """Bytes of a frame..."""
    longer: frozenset[int] = frozenset()
    """...but of these types, which may have MAX_FRAME_BYTES."""

    def refuses(self, message: str | bytes) -> str | None:
        """Return the problem of a hub's message."""
        if isinstance(message, str):
            return "the hub sent text"
        kind = PREFIX.unpack_from(message)[2] if len(message) >= PREFIX.size else 0
        if len(message) > self.most and kind not in self.longer:
            return f"the hub sent a frame of more than {self.most} bytes"
        return None


RULES = SocketRules(path="live")
SCOPE_RULES = SocketRules(
    path="scope",
    subprotocol=Subprotocol(SUBPROTOCOL),
    by_role=True,
    most=MAX_MESSAGE_BYTES,
    longer=frozenset({FrameType.SCOPE_RUN, FrameType.SCOPE_PCA}),
)
"""Docs/scope-protocol.md, section 7."""


class _NoRedirectConnect(websockets.asyncio.client.connect):
    """A connection that no answer sends elsewhere."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


@contextlib.asynccontextmanager
async def listening(hub: str, token: str, rules: SocketRules = RULES) -> AsyncIterator[Hub]:
    """One of the hub's sockets. Raises HttpError (502) if it cannot be opened."""
    try:
        connection = await _NoRedirectConnect(
            f"ws://{hub}/api/v1/{rules.path}",
            subprotocols=None if rules.subprotocol is None else [rules.subprotocol],
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
        text = f"the job's hub does not open its {rules.path} socket: {type(error).__name__}"
        raise HttpError(502, "hub-not-there", text, "It may be starting; the page tries again.") from error
    async with connection:
        if connection.subprotocol != rules.subprotocol:
            raise HttpError(502, "bad-hub", "the job's hub speaks another protocol", "Check the log of the job's hub.")
        yield connection


async def _reach(hub: str) -> socket.socket:
    """A connection to `host:port`. Raises OSError, TimeoutError."""
    parts = urllib.parse.urlsplit(f"//{hub}")
    host, port = str(parts.hostname), parts.port
    made = hub_socket(family_of(host))
    try:
        async with asyncio.timeout(OPEN_S):
            await asyncio.get_running_loop().sock_connect(made, (host, port))
    except BaseException:
        made.close()
        raise
    return made


async def proxy_frames(page: WebSocket, hub: Hub, check: Check, rules: SocketRules = RULES) -> None:
    """Pass frames on until one side ends, or `check`, which is asked every half minute, raises Refusal."""
    listening_to_page = _carry(page, hub) if rules.by_role else _listen(page)
    tasks = [asyncio.create_task(work) for work in (_pump(hub, page, rules), listening_to_page, _guard(check))]
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


async def _pump(hub: Hub, page: WebSocket, rules: SocketRules) -> tuple[int, str]:
    try:
        async for message in hub:
            wrong = rules.refuses(message)
            if wrong is not None:
                return CloseCode.FAULT, wrong
            assert isinstance(message, bytes)
            async with asyncio.timeout(SEND_S):
                await page.send_bytes(message)
    except TimeoutError:
        return CloseCode.POLICY, "the page does not read its frames"
    except ConnectionClosed as error:
        LOG.info("a hub's %s socket broke off: %r", rules.path, str(error)[:200])
        return _end(error)
    except (RuntimeError, WebSocketDisconnect):
        return CloseCode.RESTART, ""
    return CloseCode.RESTART, "the hub has ended the connection"


def _end(error: ConnectionClosed) -> tuple[int, str]:
    """Return the code with which a page's socket is closed after its hub has ended the connection, and the reason."""
    code = CloseCode.RESTART if error.rcvd is None else error.rcvd.code
    if code in PASSED_CODES:
        slow = code == CloseCode.TOO_SLOW
        return code, "the page did not keep up" if slow else "the hub did not take what the page said"
    return CloseCode.RESTART, "the hub has ended the connection"


async def _carry(page: WebSocket, hub: Hub) -> tuple[int, str]:
    """Send the page's messages to the hub, one after the other: the next one waits in the page."""
    while (message := await page.receive())["type"] != "websocket.disconnect":
        text = message.get("text")
        if text is None:
            return CloseCode.POLICY, "a page says texts only"
        try:
            async with asyncio.timeout(TEXT_S):
                await hub.send(text)
        except TimeoutError:
            return CloseCode.RESTART, "the hub does not read what the page says"
        except ConnectionClosed as error:
            return _end(error)
    return CloseCode.RESTART, ""


async def _listen(page: WebSocket) -> tuple[int, str]:
    while (await page.receive())["type"] != "websocket.disconnect":
        pass
    return CloseCode.RESTART, ""


async def _guard(check: Check) -> tuple[int, str]:
    while True:
        await asyncio.sleep(RECHECK_S)
        try:
            await check()
        except HttpError as refusal:
            return CloseCode.POLICY, reason_of(refusal)


def reason_of(refusal: HttpError) -> str:
    """As much of the words as a close frame holds (123 bytes)."""
    return str(refusal).encode()[:MAX_REASON_BYTES].decode(errors="ignore")


async def send_error(page: WebSocket, refusal: HttpError) -> None:
    """Send the page the reason why it gets no frames, as an error frame, and close."""
    await page.send_bytes(frames.encode_error(refusal.code, str(refusal), refusal.hint))
    await page.close(CloseCode.RESTART, refusal.code)
