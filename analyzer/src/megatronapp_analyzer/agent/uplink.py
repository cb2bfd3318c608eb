"""The agent's connection to the hub: connects repeatedly, sends what is buffered, receives commands."""

import asyncio
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import websockets.asyncio.client
from websockets.exceptions import InvalidHandshake, InvalidMessage, InvalidStatus, WebSocketException

from megatronapp_analyzer.agent.buffer import RingId, SendBuffer
from megatronapp_analyzer.agent.settings import AgentSettings
from megatronapp_analyzer.errors import ProtocolError
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import CloseCode

LOG = logging.getLogger(__name__)
PROTOCOL = 1
OPEN_TIMEOUT_S = 5.0
PING_S = 5.0
MAX_COMMAND_BYTES = 1 << 20
SOON_FAILURES = 30
SOON_S = 1.0
"""Longest delay of the first attempts to connect: a hub that was restarted is ready within seconds."""
REFUSED_FAILURES = 64
"""Number of failures that a refusal is equal to: the longest back-off, because an early retry would not help."""
SERVER_FAILS = 500
"""First HTTP status by which a server reports its own failure."""
Connection = websockets.asyncio.client.ClientConnection


def backoff_s(failures: int, settings: AgentSettings, jitter: float) -> float:
    """Return the delay before the next attempt.

    It doubles, at first up to SOON_S; `jitter` in [0, 1) spreads agents over half of it.
    """
    soon = min(SOON_S, settings.backoff_min_s * 2.0 ** min(failures, SOON_FAILURES))
    late = max(0, min(failures, REFUSED_FAILURES) - SOON_FAILURES)
    full = min(settings.backoff_max_s, soon * 2.0**late)
    return full * (0.5 + 0.5 * jitter)


def refuses(error: Exception) -> bool:
    """Return true if the hub refused the agent, rather than ended during a handshake or failed itself."""
    if isinstance(error, InvalidStatus):
        return error.response.status_code < SERVER_FAILS
    return isinstance(error, ProtocolError | FrameError | InvalidHandshake) and not isinstance(error, InvalidMessage)


def parse_welcome(frame: Frame) -> dict[RingId, int]:
    """Return the next index of each ring at the hub. Raises ProtocolError if the frame is no WELCOME."""
    if frame.type == FrameType.ERROR:
        raise ProtocolError(
            str(frame.header.get("code")), str(frame.header.get("message")), str(frame.header.get("hint"))
        )
    if frame.type != FrameType.WELCOME:
        raise ProtocolError("no-welcome", f"the hub's first frame is of type {frame.type}")
    return {entry["rank"]: int(entry["next"]) for entry in frame.header.get("rings", ())}


class Uplink:
    """Connection that runs until cancelled.

    `ring_frames` and `status` are called when they are needed. `last` returns the next frame of those sent after all
    records; such a frame is lost with its connection.
    """

    def __init__(
        self,
        settings: AgentSettings,
        buffer: SendBuffer,
        *,
        ring_frames: Callable[[], Iterable[bytes]],
        status: Callable[[], Mapping[str, Any]],
        on_command: Callable[[Mapping[str, Any]], None],
        last: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._buffer = buffer
        self._ring_frames = ring_frames
        self._status = status
        self._on_command = on_command
        self._last = last
        self._wake = asyncio.Event()
        self._urgent: dict[str, bytes] = {}
        self._idle = asyncio.Event()
        self.connections = 0

    def notify(self) -> None:
        """Signal that the buffer has something new."""
        self._idle.clear()
        self._wake.set()

    def send_first(self, key: str, frame: bytes) -> None:
        """Send a frame before the records that wait, in place of one of the same key that is still waiting.

        After a reconnect all RING frames are sent anyway.
        """
        self._urgent[key] = frame
        self.notify()

    async def flushed(self) -> None:
        """Wait until everything buffered was sent."""
        await self._idle.wait()

    async def run(self) -> None:
        """Connect and serve, again after each disconnect."""
        failures = 0
        while True:
            before, waits = self.connections, REFUSED_FAILURES
            try:
                await self._connect_once()
            except (ProtocolError, FrameError, WebSocketException, OSError) as error:
                if refuses(error):
                    LOG.error("hub %s refuses: %s", self._settings.hub_url, error)
                    failures = 0
                else:
                    if failures == 0:
                        LOG.warning("cannot reach hub %s: %s: %s", self._settings.hub_url, type(error).__name__, error)
                    waits = failures = 0 if self.connections > before else failures + 1
            await asyncio.sleep(backoff_s(waits, self._settings, random.random()))

    async def _connect_once(self) -> None:
        async with websockets.asyncio.client.connect(
            self._settings.socket_url,
            additional_headers={"Authorization": f"Bearer {self._settings.token}"},
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=1.0,
            ping_interval=PING_S,
            ping_timeout=2 * PING_S,
            compression=None,
            proxy=None,  # the hub is on the job's own network; a proxy of the environment would receive our token
            max_size=MAX_COMMAND_BYTES,
        ) as connection:
            await self._greet(connection)
            self.connections += 1
            await self._serve(connection)

    async def _greet(self, connection: Connection) -> None:
        settings = self._settings
        hello = {
            "job": settings.job,
            "uid": settings.uid,
            "attempt": settings.attempt,
            "worker": settings.worker,
            "node": settings.node,
            "address": settings.address,
            "pid": os.getpid(),
            "protocol": PROTOCOL,
        }
        await connection.send(frames.encode(Frame(FrameType.HELLO, hello)))
        welcome = parse_welcome(_decode(await asyncio.wait_for(connection.recv(), OPEN_TIMEOUT_S)))
        self._urgent.clear()
        for frame in self._ring_frames():
            await connection.send(frame)
        self._buffer.rewind(welcome)
        self.notify()

    async def _serve(self, connection: Connection) -> None:
        tasks = [asyncio.create_task(work(connection)) for work in (self._send_all, self._send_status, self._receive)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self, connection: Connection) -> None:
        while True:
            while self._urgent:
                key, frame = next(iter(self._urgent.items()))
                await connection.send(frame)
                if self._urgent.get(key) is frame:
                    del self._urgent[key]
            packet = self._buffer.peek()
            if packet is not None:
                await connection.send(packet.data)
                self._buffer.mark_sent(packet)
                continue
            if (last := self._last()) is not None:
                await connection.send(last)
                continue
            self._idle.set()
            await self._wake.wait()
            self._wake.clear()

    async def _send_status(self, connection: Connection) -> None:
        while True:
            await connection.send(frames.encode(Frame(FrameType.STATUS, self._status())))
            await asyncio.sleep(self._settings.status_s)

    async def _receive(self, connection: Connection) -> None:
        async for message in connection:
            frame = _decode(message)
            if frame.type == FrameType.COMMAND:
                self._on_command(frame.header)
            elif frame.type == FrameType.ERROR:
                raise ProtocolError(str(frame.header.get("code")), json.dumps(dict(frame.header)))
        if connection.close_code == CloseCode.REPLACED:
            raise ProtocolError("replaced", "another agent of this worker has connected")


def _decode(message: str | bytes) -> Frame:
    if isinstance(message, str):
        raise ProtocolError("text-message", "the hub sent a text message")
    return frames.decode(message)
