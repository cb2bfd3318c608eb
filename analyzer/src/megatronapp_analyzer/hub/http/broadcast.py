"""Frames for pages: one bounded queue each, so that a slow page loses its own connection and delays no other page."""

import asyncio
import logging
import time
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from megatronapp_analyzer.hub.http import views
from megatronapp_analyzer.hub.ingest.curves import CurvePoint
from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest
from megatronapp_analyzer.hub.service import Hub
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import CloseCode

LOG = logging.getLogger(__name__)
QUEUE_FRAMES = 256
SNAPSHOT_MIN_S = 1.0
SNAPSHOT_MAX_S = 5.0

router = APIRouter()


class Broadcaster:
    """Sender of every frame to every page."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    def __len__(self) -> int:
        return len(self._queues)

    def subscribe(self) -> "asyncio.Queue[bytes | None]":
        """Return a queue of frames for a new page; None in it means that the page was too slow and is disconnected."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_FRAMES)
        self._queues.add(queue)
        return queue

    def unsubscribe(self, queue: "asyncio.Queue[bytes | None]") -> None:
        """Remove the queue of a page."""
        self._queues.discard(queue)

    def publish(self, frame: bytes) -> None:
        """Queue a frame for all pages."""
        for queue in list(self._queues):
            if queue.full():
                self._let_go(queue)
            else:
                queue.put_nowait(frame)

    def _let_go(self, queue: "asyncio.Queue[bytes | None]") -> None:
        self._queues.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)


def steps_frame(attempt: int, digests: Iterable[StepDigest]) -> bytes:
    """Return a STEPS frame of steps of one attempt; body float32 [metric][rank][step]."""
    chosen = list(digests)
    body = np.stack([digest.values for digest in chosen], axis=-1).astype("<f4")
    header = {
        "attempt": attempt,
        "steps": [digest.step for digest in chosen],
        "startsNs": [digest.start_real_ns for digest in chosen],
        "durationsNs": [digest.duration_ns for digest in chosen],
        "ranks": list(range(body.shape[1])),
        "metrics": list(METRICS),
    }
    return frames.encode(Frame(FrameType.STEPS, header, body.tobytes()))


def metrics_frame(points: Iterable[CurvePoint]) -> bytes:
    """Return a METRICS frame of the newest points."""
    series: dict[str, dict[str, list[float]]] = {}
    for point in points:
        curve = series.setdefault(point.name, {"attempts": [], "steps": [], "values": []})
        curve["attempts"].append(point.attempt)
        curve["steps"].append(point.step)
        curve["values"].append(point.value)
    return frames.encode(Frame(FrameType.METRICS, {"series": series}))


class LiveFeed:
    """Sender of a snapshot to new pages, and of what is new in the hub to all pages at each tick."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.pages = Broadcaster()
        self._sent_verdicts = 0
        self._sent_snapshot: tuple[float, dict[str, Any]] = (0.0, {})

    async def run(self) -> None:
        """Publish updates until cancelled."""
        while True:
            await asyncio.sleep(self._hub.settings.tick_s)
            self.publish_updates(time.monotonic())

    def greeting(self) -> list[bytes]:
        """Return the frames that a page gets first."""
        return [_snapshot_frame(views.snapshot(self._hub)), self._verdicts_frame()]

    def publish_updates(self, now_s: float) -> None:
        """Send pages what is new since the last call."""
        steps, points = self._hub.take_updates()
        if not len(self.pages):
            return
        for (attempt, _), group in groupby(steps, key=lambda step: (step.view.attempt, step.digest.values.shape)):
            self.pages.publish(steps_frame(attempt, (step.digest for step in group)))
        if points:
            self.pages.publish(metrics_frame(points))
        if self._hub.verdicts.version != self._sent_verdicts:
            self.pages.publish(self._verdicts_frame())
            self._sent_verdicts = self._hub.verdicts.version
        self._publish_snapshot(now_s)

    def _publish_snapshot(self, now_s: float) -> None:
        sent_s, sent = self._sent_snapshot
        if now_s - sent_s < SNAPSHOT_MIN_S:
            return
        snapshot = views.snapshot(self._hub)
        if snapshot != sent or now_s - sent_s >= SNAPSHOT_MAX_S:
            self.pages.publish(_snapshot_frame(snapshot))
            self._sent_snapshot = (now_s, snapshot)

    def _verdicts_frame(self) -> bytes:
        return frames.encode(Frame(FrameType.VERDICTS, {"verdicts": views.verdict_documents(self._hub)}))


def _snapshot_frame(snapshot: dict[str, Any]) -> bytes:
    return frames.encode(Frame(FrameType.SNAPSHOT, snapshot | {"serverTime": time.time()}))


@router.websocket("/api/v1/live")
async def page(socket: WebSocket) -> None:
    """Serve one page until it disconnects or is too slow. Frames from the page are ignored."""
    await socket.accept()
    feed: LiveFeed = socket.app.state.live
    queue = feed.pages.subscribe()
    try:
        for frame in feed.greeting():
            await socket.send_bytes(frame)
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(_until_disconnected(socket))
            sender = group.create_task(_send_all(socket, queue))
            await asyncio.wait({listener, sender}, return_when=asyncio.FIRST_COMPLETED)
            listener.cancel()
            sender.cancel()
    except* WebSocketDisconnect:
        LOG.debug("a page disconnected")
    finally:
        feed.pages.unsubscribe(queue)


async def _until_disconnected(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _send_all(socket: WebSocket, queue: "asyncio.Queue[bytes | None]") -> None:
    while (frame := await queue.get()) is not None:
        await socket.send_bytes(frame)
    await socket.send_bytes(frames.encode_error("too-slow", "the page did not keep up", "Connect again."))
    await socket.close(CloseCode.TOO_SLOW)
