"""The scope socket of one page: frames are sent, commands received. A slow page never blocks another."""

import asyncio
import contextlib
import json
import logging
import time
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.delivery.viewer_feed import Viewer, ViewerFeed
from megatronapp_common import frames
from megatronapp_common.names import CloseCode
from megatronapp_common.scope.protocol import MAX_COMMAND_BYTES
from megatronapp_common.web.token_bucket import BucketSize, TokenBuckets

LOG = logging.getLogger(__name__)
RESUMES = BucketSize(burst=10, per_s=10)
"""Replays that one page may request in a second."""
MESSAGES = BucketSize(burst=200, per_s=200)
"""Messages of a page in a second; an honest one sends one for every frame it paints."""
GOODBYE_S = 1.0


async def serve(socket: WebSocket, feed: ViewerFeed, role: str) -> None:
    """Serve one page until it disconnects, breaks the rules, or does not read."""
    viewer = feed.subscribe()
    works = [_send_all(socket, viewer, feed.hello_frame(role)), _listen(socket, viewer, feed), viewer.overrun.wait()]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        problem = next((task.exception() for task in tasks if task.done()), None)
    finally:
        feed.unsubscribe(viewer)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(problem, ProtocolError):
        await refuse(socket, CloseCode.POLICY, problem)
    elif viewer.overrun.is_set():
        await refuse(
            socket, CloseCode.TOO_SLOW, ProtocolError("too-slow", "the page did not keep up", "Connect again.")
        )
    elif problem is not None and not isinstance(problem, WebSocketDisconnect):
        raise problem


async def refuse(socket: WebSocket, code: int, problem: ProtocolError) -> None:
    """Send the reason, if the page still reads, and close."""
    with contextlib.suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
        async with asyncio.timeout(GOODBYE_S):
            await socket.send_bytes(frames.encode_error(problem.code, str(problem), problem.hint))
            await socket.close(code, reason=problem.code)


async def _send_all(socket: WebSocket, viewer: Viewer, hello: bytes) -> None:
    await socket.send_bytes(hello)
    while True:
        while waiting := viewer.outbox.pop():
            for frame in waiting:
                await socket.send_bytes(frame)
        viewer.wake.clear()
        await viewer.wake.wait()


async def _listen(socket: WebSocket, viewer: Viewer, feed: ViewerFeed) -> None:
    buckets = TokenBuckets(2)
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1005)
        if buckets.consume({"messages": MESSAGES}, time.monotonic()) is not None:
            raise ProtocolError("too-many", f"more than {MESSAGES.burst:.0f} messages in a second", "Send fewer.")
        command = parse_command(message.get("text"))
        if command["type"] == "resume" and buckets.consume({"resumes": RESUMES}, time.monotonic()) is not None:
            raise ProtocolError(
                "too-many", f"more than {RESUMES.burst:.0f} resumes in a second", "Follow one run at a time."
            )
        _run_command(command, viewer, feed)


def parse_command(text: str | None) -> dict[str, Any]:
    """Parse a command of a page. Raises ProtocolError."""
    if text is None or len(text.encode("utf-8", "surrogatepass")) > MAX_COMMAND_BYTES:
        raise ProtocolError("bad-message", f"not a text of at most {MAX_COMMAND_BYTES} bytes", "Send JSON texts.")
    try:
        command = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("bad-message", f"not JSON: {error}", "Send JSON texts.") from error
    if not isinstance(command, dict) or not isinstance(command.get("type"), str):
        raise ProtocolError("bad-message", "not an object with a type", 'Send {"type": "credit", "bytes": n}.')
    return command


def _run_command(command: dict[str, Any], viewer: Viewer, feed: ViewerFeed) -> None:
    """Run a command. Raises ProtocolError for an unknown type and wrong values."""
    if command["type"] == "credit":
        viewer.outbox.grant(_count(command, "bytes"))
        viewer.wake.set()
    elif command["type"] == "resume":
        feed.resume(viewer, str(command.get("run")), _count(command, "seq"))
    else:
        what = f"there is no message of type {command['type'][:40]!r}"
        raise ProtocolError("bad-message", what, "Send credit or resume (docs/scope-protocol.md, 7).")


def _count(command: dict[str, Any], name: str) -> int:
    value = command.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ProtocolError("bad-message", f"{command['type']}: {name} is not a whole number from 0 on")
    return value
