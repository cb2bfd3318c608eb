"""The pages that watch MegaScope, and what all of them are sent."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from megatronapp_analyzer.scope.delivery.page_queue import PageQueue
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.frame_log import LogEntry
from megatronapp_analyzer.scope.store.publishers import PublisherRegistry
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_analyzer.scope.store.run_store import RunStore
from megatronapp_common import frames
from megatronapp_common.filters.reducers import NAMES
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import PROTOCOL
from megatronapp_common.scope.protocol_requests import (
    MAX_EXPRESSION,
    MAX_PINNED,
    CaptureSettings,
    StateSelection,
)

READY = "The model answers.", ""
PRESETS = {
    "default": CaptureSettings().model_dump(mode="json", by_alias=True),
    "lite": CaptureSettings(preset="lite", states=StateSelection(mlp1=False)).model_dump(mode="json", by_alias=True),
    "off": CaptureSettings(
        preset="off", states=StateSelection(qkv=False, attention=False, mlp1=False, mlp2=False, pca=False)
    ).model_dump(mode="json", by_alias=True),
}
"""Captures by name, with the states that each shows at most."""


class Viewer:
    """One page: its queue, and the events that wake its sender or end its connection."""

    def __init__(self) -> None:
        self.outbox = PageQueue()
        self.wake = asyncio.Event()
        self.overrun = asyncio.Event()

    def push(self, entry: LogEntry) -> None:
        """Queue a frame; never waits."""
        self.outbox.push(entry)
        self.wake.set()
        if self.outbox.overrun:
            self.overrun.set()


class ViewerFeed:
    """Hands frames of runs, and the state of the model, to every page."""

    def __init__(self, settings: ScopeSettings, publishers: PublisherRegistry, runs: RunStore) -> None:
        self.runs = runs
        self.state = "gone"
        """State of the model: `ready`, `restarting` or `gone`."""
        self.boot = secrets.token_hex(6)
        """Names this life of the hub: a later one numbers its frames from 1 again."""
        self.watched = asyncio.Event()
        """Set once there has been a page."""
        self._settings = settings
        self._publishers = publishers
        self._viewers: set[Viewer] = set()
        self._sent_ranks: list[Any] = []
        """The layout of ranks that pages have."""

    def subscribe(self) -> Viewer:
        """Add a page; it gets all frames from now on."""
        viewer = Viewer()
        self._viewers.add(viewer)
        self.watched.set()
        return viewer

    def unsubscribe(self, viewer: Viewer) -> None:
        """Remove a page from the feed."""
        self._viewers.discard(viewer)

    def publish(self, entry: LogEntry) -> None:
        """Hand a frame to every page; never waits."""
        for viewer in self._viewers:
            viewer.push(entry)

    def publish_all(self, entries: Iterable[LogEntry]) -> None:
        """Hand frames to every page, each before the next one is made."""
        for entry in entries:
            self.publish(entry)

    def publish_frame(self, run: ScopeRun, frame: Frame) -> None:
        """Add a frame to a run, and hand it to every page."""
        self.publish(run.journal.append(frame))

    def publish_gap(
        self,
        run: ScopeRun,
        what: str,
        span: tuple[int, int],
        reason: str,
        ranks: Sequence[int] = (),
        *,
        tensors: Sequence[str] = (),
    ) -> None:
        """Report steps `span` of a run that pages do not get, or not whole."""
        header = {"run": run.id, "what": what, "from": span[0], "to": span[1], "ranks": list(ranks), "reason": reason}
        named = {"tensors": list(tensors)} if tensors else {}
        self.publish_frame(run, Frame(FrameType.SCOPE_GAP, header | named))

    def resume(self, viewer: Viewer, run: str, seq: int) -> None:
        """Send a page again what follows `seq`, or the whole run if the hub has restarted since."""
        if (known := self.runs.get(run)) is None:
            return

        def replay() -> list[LogEntry]:
            return known.journal.after(seq if seq <= known.journal.newest else 0)

        viewer.outbox.resume(run, replay)
        viewer.wake.set()

    def set_state(self, state: str, message: str, hint: str) -> None:
        """Change the state of the model."""
        if state != self.state:
            self.state = state
            self._publish_state(message, hint)

    def publish_layout(self) -> None:
        """Send the layout once all ranks have reported: pages that connected before know the number of stages only."""
        ranks = self._publishers.reported_layout().get("ranks", [])
        if ranks and ranks != self._sent_ranks:
            self._publish_state(*READY)

    def _publish_state(self, message: str, hint: str) -> None:
        queue = sum(run.header.get("state") == "queued" for run in self.runs.values())
        layout = self._publishers.reported_layout()
        self._sent_ranks = layout.get("ranks", [])
        header = {"state": self.state, "message": message, "hint": hint, "queue": queue, "layout": layout}
        whole = frames.encode(Frame(FrameType.SCOPE_STATE, header))
        self.publish(LogEntry("", 0, FrameType.SCOPE_STATE, 0, whole, whole))

    def hello(self, role: str) -> dict[str, Any]:
        """Return the header of SCOPE_HELLO."""
        return {
            "protocol": PROTOCOL,
            "boot": self.boot,
            "role": role,
            "job": self._settings.job,
            "source": self._settings.source,
            "state": self.state,
            "model": self._publishers.model,
            "layout": self._publishers.reported_layout(),
            "limits": {
                **self._publishers.limits,
                "pinnedHeads": MAX_PINNED,
                "ringBytes": self._settings.ring_bytes,
                "expressionLength": MAX_EXPRESSION,
            },
            "presets": PRESETS,
            "reducers": list(NAMES),
            "sites": sorted(self._publishers.sites),
            "perturbations": self._publishers.perturbations,
            "runs": self.runs.summaries(),
        }

    def hello_frame(self, role: str) -> bytes:
        """Return SCOPE_HELLO as encoded bytes."""
        return frames.encode(Frame(FrameType.SCOPE_HELLO, self.hello(role)))
