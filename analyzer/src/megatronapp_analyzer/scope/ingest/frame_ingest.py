"""Frames that ranks send, as their agents pass them on."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.delivery.viewer_feed import READY, ViewerFeed
from megatronapp_analyzer.scope.ingest.engine_liveness import EngineLiveness
from megatronapp_analyzer.scope.ingest.events import ScopeEvents
from megatronapp_analyzer.scope.ingest.rejected_frames import RejectedFrames
from megatronapp_analyzer.scope.ingest.run_states import RunStateIngest
from megatronapp_analyzer.scope.ingest.step_ingest import StepIngest
from megatronapp_analyzer.scope.parts.merge import shard_tensors_of
from megatronapp_analyzer.scope.parts.part_tracker import part_of
from megatronapp_analyzer.scope.parts.probe_tracker import ProbeTracker, ranks_disconnected
from megatronapp_analyzer.scope.parts.step_assembler import ClosedStep, ScopeStepAssembler, number
from megatronapp_analyzer.scope.parts.wire_models import StepHeader, read
from megatronapp_analyzer.scope.store.pca_versions import PcaVersions
from megatronapp_analyzer.scope.store.publishers import LEADER, PublisherRegistry
from megatronapp_common.frames import Frame, FrameType


class FrameIngest:
    """Takes frames of ranks, and notices when ranks are lost. Runs on the hub's event loop; `clock` gives seconds.

    A frame that cannot be used is counted and skipped.
    """

    def __init__(
        self,
        *,
        publishers: PublisherRegistry,
        probes: ProbeTracker,
        feed: ViewerFeed,
        pca: PcaVersions,
        clock: Callable[[], float],
        events: ScopeEvents,
    ) -> None:
        self.rejected = RejectedFrames()
        self.assembler = ScopeStepAssembler()
        self._publishers = publishers
        self._probes = probes
        self._feed = feed
        self._pca = pca
        self._clock = clock
        self._events = events
        self._engine = EngineLiveness()
        self._steps = StepIngest(feed, publishers, pca=pca, rejected=self.rejected, events=events)
        self._states = RunStateIngest(feed.runs, feed, assembler=self.assembler, rejected=self.rejected, events=events)
        self._timer: asyncio.TimerHandle | None = None

    def take_frame(self, attempt: int, worker: int, frame: Frame) -> None:
        """Take a frame of a rank."""
        with self.rejected.counted():
            self._take(attempt, worker, frame)
        self.close_due()

    def _take(self, attempt: int, worker: int, frame: Frame) -> None:
        if frame.type == FrameType.SCOPE_PUBLISHER:
            self._take_publisher(worker, frame)
        elif attempt < self._publishers.attempt:
            return
        elif frame.type == FrameType.SCOPE_LEFT:
            ranks = self._publishers.remove(attempt, worker, number(frame.header, "rank"))
            self._on_ranks_lost(ranks, for_good=True)
        elif frame.type == FrameType.SCOPE_PART:
            self._take_part(frame)
        elif frame.type == FrameType.SCOPE_TOKENS:
            read(StepHeader, "TOKENS", frame.header)
            self.assembler.add_tokens(_step_key(frame), frame, self._clock())
        elif frame.type == FrameType.SCOPE_RUN_STATE:
            self._states.take(frame)

    def _take_publisher(self, worker: int, frame: Frame) -> None:
        before = self._publishers.attempt
        self._publishers.add(frame.header, worker)
        if self._publishers.attempt > before >= 0:
            self._fail_open()
        if LEADER in self._publishers.ranks:
            self._engine.mark_alive()
            self._feed.set_state("ready", *READY)
        self._feed.publish_layout()
        if frame.header.get("rank") == LEADER:
            self._events.engine_started()

    def _take_part(self, frame: Frame) -> None:
        publisher = self._publishers.ranks.get(number(frame.header, "rank"))
        if publisher is None or publisher.replica != 0:
            return
        tensors, part = shard_tensors_of(frame, publisher.tp), part_of(publisher.rank, frame.header)
        for tensor in tensors:
            if tensor.version is not None:
                self._pca.note(tensor.version)
        if frame.header.get("probe") is not None:
            self._probes.add(str(frame.header["probe"])[:64], tensors, self._clock(), part)
            self._probes.settle(self._publishers.expected(), self._clock())
        else:
            self.assembler.add_part(_step_key(frame), tensors, self._clock(), part)

    def take_run_state(self, frame: Frame) -> None:
        """Take a RUN_STATE that the hub has fetched from rank 0 itself."""
        with self.rejected.counted():
            self._states.take(frame)
        self.close_due()

    def on_attempt(self, attempt: int) -> None:
        """An agent of this attempt has connected: ranks of an older one have ended."""
        if self._publishers.attempt >= 0 and self._publishers.begin(attempt):
            self._on_ranks_lost([LEADER], for_good=True)

    def on_agent_lost(self, attempt: int, worker: int, *, for_good: bool = False) -> None:
        """The agent of a worker disconnected, `for_good` if it reported that its ranks have ended."""
        self._on_ranks_lost(self._publishers.remove(attempt, worker), for_good=for_good)

    def _on_ranks_lost(self, ranks: Sequence[int], *, for_good: bool) -> None:
        if not ranks:
            return
        self._feed.set_state("restarting", "Model ranks are disconnected.", "Views resume when they reconnect.")
        if LEADER in ranks and for_good:
            self._fail_open()
        elif LEADER in ranks:
            self._engine.mark_lost(self._clock())
        self._probes.clear(ranks_disconnected)
        self.close_due()

    def _fail_open(self) -> None:
        self._engine.mark_alive()
        self._probes.clear()
        self._states.fail_open()

    def close_due(self) -> None:
        """Show steps that are ready, end runs that wait for nothing more, and schedule the next call."""
        if self._engine.take_timeout(self._clock()):
            self._fail_open()
        for step in self.assembler.close(self._publishers.expected(), self._clock()):
            with self.rejected.counted():
                self._show(step)
        self._states.take_ends()
        self._schedule_close()

    def _show(self, step: ClosedStep) -> None:
        run = self._feed.runs.get(step.run)
        if run is None:
            self.assembler.forget(step.run)
            raise ProtocolError("no-run", "its state was not received")
        self._steps.take(run, step)

    def _schedule_close(self) -> None:
        self.close()
        due = min(
            (due_s for due_s in (self.assembler.due_s(), self._engine.due_s()) if due_s is not None), default=None
        )
        with contextlib.suppress(RuntimeError):  # without a loop, as in tests, the caller calls `close_due` itself
            loop = asyncio.get_running_loop()
            if due is not None:
                self._timer = loop.call_later(max(0.001, due - self._clock()), self.close_due)

    def close(self) -> None:
        """Stop the timer of `close_due`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _step_key(frame: Frame) -> tuple[str, int]:
    run = frame.header.get("run")
    if not isinstance(run, str) or not 1 <= len(run) <= 64:
        raise ProtocolError("bad-frame", "run is not a short text")
    return run, number(frame.header, "step")
