"""The hub itself: receives frames of agents and lets the detector judge finished steps. Knows nothing of HTTP.

Everything here runs on one event loop; only the detector works in a separate process.
"""

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from pydantic import ValidationError

from megatronapp_analyzer.hub.archive.history import StepHistory
from megatronapp_analyzer.hub.archive.spooled_ingest import SpooledIngest
from megatronapp_analyzer.hub.blame.newest_blame import NewestBlame
from megatronapp_analyzer.hub.ingest.curves import CurvePoint
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.pipeline_passes import PassesCache, PlanSamples
from megatronapp_analyzer.hub.ingest.role_passes import RolesCache
from megatronapp_analyzer.hub.ingest.step_graphs import StepGraphs
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.judge.links import JudgeLink
from megatronapp_analyzer.hub.settings import HubSettings
from megatronapp_analyzer.hub.state import ranks
from megatronapp_analyzer.hub.state.agent_link import AgentLink
from megatronapp_analyzer.hub.state.answer_cache import AnswerCache
from megatronapp_analyzer.hub.state.captures import TrainingCaptures
from megatronapp_analyzer.hub.state.detector_task import MAX_WAITING, DetectorTask, WaitingStep
from megatronapp_analyzer.hub.state.faults import FaultStore
from megatronapp_analyzer.hub.state.lease import ControlLease
from megatronapp_analyzer.hub.state.rank_monitor import RankMonitor
from megatronapp_analyzer.hub.state.totals import HubTotals, WasteSums
from megatronapp_analyzer.hub.state.training_orders import StoredOrder, TrainingOrders, described
from megatronapp_analyzer.hub.state.verdict_reasons import VerdictReasons
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.hub.state.windows import SuspectWindows, WindowStore
from megatronapp_analyzer.hub.timeline.columns import ColumnsCache
from megatronapp_analyzer.model import Verdict
from megatronapp_analyzer.scope.service import ScopeService
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_common.frames import Frame, FrameType

LOG = logging.getLogger(__name__)
CAPTURE_TYPES = frozenset({FrameType.TRAINING_RANK, FrameType.TRAINING_STATISTICS, FrameType.TRAINING_PROBE})
SCOPE_TYPES = frozenset(range(FrameType.SCOPE_PUBLISHER, FrameType.SCOPE_HELLO)) - CAPTURE_TYPES


class Hub:
    """State of one job as its agents report it."""

    def __init__(self, settings: HubSettings, judge: JudgeLink) -> None:
        self.settings = settings
        self.identity = settings.job
        self.ended = ended = settings.ended
        live = ended is None
        limits = settings.spool or settings.job.spool
        self.ingest = TraceIngest(settings.store, aligns=not live)
        self.spooled = SpooledIngest(
            self.ingest,
            self._path("traces"),
            limits,
            archive=self._path("store", settings.job.name),
            writable=live,
        )
        self.verdicts = VerdictStore(self._path("verdicts.json"), writable=live)
        self.faults = FaultStore(self._path("faults.json"), settings.job.faults, writable=live)
        self.faults.on_change = self.send_control_documents
        self.windows = WindowStore(self._path("windows.json"), writable=live)
        self.windows.on_change = self.send_control_documents
        self._suspect_windows = SuspectWindows(self.windows)
        self.verdicts.on_new = self._record_in_detail
        self.verdicts.explain = VerdictReasons(self.ingest).explain
        self.orders = TrainingOrders(self._path("orders.json"), writable=live)
        self.orders.on_change = self.send_control_documents
        self.orders.on_decision = self._note_decision
        self.lease = ControlLease()
        self.captures = TrainingCaptures(self._path("captures.frames"), disk_bytes=limits.captures_bytes, writable=live)
        self.scope = ScopeService(ScopeSettings(job=settings.job.name), settings.serve)
        self.ranks = RankMonitor(
            self.ingest, self.verdicts, ended=ended is not None, progress=None if ended is None else ended.progress
        )
        self.analysis = DetectorTask(
            judge,
            self.verdicts,
            liveness=self.ranks.liveness,
            stored=self._steps_to_learn_from,
            clocks=self.spooled,
            waste=WasteSums(self._path("waste.json"), writable=live),
        )
        self.totals = HubTotals()
        self.passes = PassesCache()
        self.roles = RolesCache()
        self.graphs = StepGraphs()
        self.timelines = ColumnsCache()
        self.history = StepHistory(self.ingest, self.spooled)
        self.answers = AnswerCache()
        self.blame = NewestBlame(self.ingest, self.graphs, self.answers, self.totals)
        self.plan_samples = PlanSamples()
        self.links: dict[tuple[int, int], AgentLink] = {}
        self.ready = False
        self.failed = False
        """True once a task of the hub has ended by itself, which none should."""
        self.on_failure: Callable[[], None] = lambda: None
        self._said_bye: set[tuple[int, int]] = set()
        self._fresh_steps: list[StoredStep] = []
        self._fresh_points: list[CurvePoint] = []

    # ---- life

    @contextlib.asynccontextmanager
    async def running(self, serve_pages: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        """Restore, then analyse and serve pages until left; the hub fails if either ends before."""
        for step in self.spooled.restore(self.settings.restore_segments):
            self._sample(step)
            if self.ended is None:
                self._analyse(step, again=True)
        tasks = [asyncio.create_task(serve_pages())]
        if self.ended is None:
            tasks.append(asyncio.create_task(self.analysis.run(self.settings.tick_s)))
            tasks.append(asyncio.create_task(self.blame.run()))
        else:
            self.analysis.caught_up = True
        for task in tasks:
            task.add_done_callback(self._note_end)
        self.ready = True
        try:
            async with self.scope.running():
                yield
        finally:
            self.ready = False
            # At once with the end of the rest: the backend kills a hub whose end takes too long.
            storing = asyncio.create_task(asyncio.to_thread(self.spooled.close))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.answers.close()
            self.history.close()
            await storing

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """End the hub: one that answers but no longer analyses is worse than one that its backend starts again."""
        if task.cancelled():
            return
        LOG.critical("%s ended; the hub ends, too", task.get_coro(), exc_info=task.exception())
        self.ready, self.failed = False, True
        self.on_failure()

    def _path(self, *names: str) -> pathlib.Path | None:
        if self.settings.state_dir is None:
            return None
        self.settings.state_dir.mkdir(parents=True, exist_ok=True)
        return self.settings.state_dir.joinpath(*names)

    # ---- agents

    def connect(self, link: AgentLink) -> dict[str, Any]:
        """Add an agent; returns the header of its WELCOME. An older connection of the same worker ends."""
        key = (link.attempt, link.worker)
        if (older := self.links.get(key)) is not None:
            self.totals.protocol_errors += older.replace(link)
        self.links[key] = link
        self.scope.core.ingest.on_attempt(link.attempt)
        link.command(self._control_document(link.attempt))
        state = self.ingest.attempts.get(link.attempt)
        have = (
            {rank: index for (worker, rank), index in state.next_index.items() if worker == link.worker}
            if state
            else {}
        )
        return {"server": "megatronapp-hub", "rings": [{"rank": rank, "next": index} for rank, index in have.items()]}

    def disconnect(self, link: AgentLink) -> None:
        """Remove an agent that has disconnected."""
        key = (link.attempt, link.worker)
        if self.links.get(key) is link:
            del self.links[key]
            self.scope.core.ingest.on_agent_lost(link.attempt, link.worker)

    def take_frame(self, link: AgentLink, frame: Frame, raw: bytes) -> None:
        """Take one frame of an agent. Raises ProtocolError; types of a newer release are skipped."""
        if frame.type == FrameType.RECORDS:
            self._take_records(link, frame, raw)
        elif frame.type == FrameType.STATUS:
            self._take_status(link, frame.header)
        elif frame.type == FrameType.RING:
            self._take_ring(link, frame.header, raw)
        elif frame.type == FrameType.BYE:
            self._take_bye(link, str(frame.header.get("reason")))
        elif frame.type in CAPTURE_TYPES:
            self.captures.take_frame(frame, attempt=link.attempt, worker=link.worker)
        elif frame.type in SCOPE_TYPES:
            self.scope.core.ingest.take_frame(link.attempt, link.worker, frame)

    def _take_bye(self, link: AgentLink, reason: str) -> None:
        """Note that a worker ended; after the last one, unfinished steps of the attempt are finished as they are."""
        LOG.info("agent of worker %d, attempt %d, ended: %s", link.worker, link.attempt, reason)
        self._said_bye.add((link.attempt, link.worker))
        self.scope.core.ingest.on_agent_lost(link.attempt, link.worker, for_good=True)
        self.captures.end_worker(link.attempt, link.worker)
        state = self.ingest.attempts.get(link.attempt)
        if state is None or len(state.rings) < state.world:
            return
        if all((link.attempt, ring.worker) in self._said_bye for ring in state.rings.values()):
            self._finish(self.spooled.end_attempt(link.attempt))

    def _take_ring(self, link: AgentLink, header: Mapping[str, Any], raw: bytes) -> None:
        before = self.ingest.newest
        self._finish(self.spooled.add_ring(link.attempt, link.worker, header, raw))
        newest = self.ingest.newest
        if newest is not before and newest is not None and newest.attempt == link.attempt:
            self.ranks.reset()

    def _take_records(self, link: AgentLink, frame: Frame, raw: bytes) -> None:
        taken = self.spooled.add_records(link.attempt, frame, raw)
        if not taken.records:
            return
        self.totals.records += taken.records
        self._fresh_points += taken.points
        self._finish(taken.finished)

    def _take_status(self, link: AgentLink, header: Mapping[str, Any]) -> None:
        status = ranks.parse_agent_status(header, time.monotonic_ns(), link.attempt)
        link.shared_memory = status.shared_memory
        newest = self.ingest.newest
        if newest is not None and link.attempt != newest.attempt:
            return
        progress = self.ranks.progress
        if progress is not None and progress.attempt is not None and link.attempt < progress.attempt:
            return
        try:
            self.ranks.update(status)
            progress = self.ranks.progress
            if progress is not None and progress.attempt == link.attempt:
                self.orders.observe(link.attempt, progress.control)
        except ValidationError as error:  # the reporting rank's mistake; the rest of what its agent sends is right
            self.totals.protocol_errors += 1
            LOG.warning("a progress document is ignored: %s", error)

    def _finish(self, steps: list[StoredStep]) -> None:
        for step in steps:
            state = self.ingest.attempts[step.view.attempt]
            self.totals.add_step(step, {rank: ring.worker for rank, ring in state.rings.items()})
            self._fresh_steps.append(step)
            self._sample(step)
            self._analyse(step)

    def _analyse(self, step: StoredStep, *, again: bool = False) -> None:
        layout = self.ingest.attempts[step.view.attempt].layout
        if layout is not None:
            (self.analysis.add_again if again else self.analysis.add)(layout, [step])

    def _steps_to_learn_from(self) -> list[WaitingStep]:
        """Return the steps of the newest attempt that are in memory, for a fresh detector."""
        newest = self.ingest.newest
        if newest is None or newest.layout is None:
            return []
        steps = self.ingest.store.newest(MAX_WAITING)
        return [(newest.layout, step) for step in steps if step.view.attempt == newest.attempt]

    def _sample(self, step: StoredStep) -> None:
        layout = self.ingest.attempts[step.view.attempt].layout
        if layout is not None:
            self.plan_samples.add(step, layout, [plan.from_step for plan in self.ranks.plans()])

    def _record_in_detail(self, verdict: Verdict) -> None:
        """Record the ranks of a new verdict in detail, unless the steps are those of a restart or of an ended job."""
        newest_step, attempt = self.ingest.newest_step(), self.ingest.newest
        if self.ended is not None or not self.analysis.caught_up or newest_step is None or attempt is None:
            return
        has_layers = attempt.layout is not None and not attempt.layout.roles
        step_s = self.ingest.usual_step_s()
        window = self._suspect_windows.order(verdict, newest_step=newest_step, step_s=step_s, has_layers=has_layers)
        if window is not None:
            LOG.info("%s: steps %d to %d are recorded in detail", verdict.id, window.from_step, window.last_step)

    def send_control_documents(self) -> None:
        """Send every agent what its ranks are to read: faults, and orders with the signs of life of their client."""
        for link in self.links.values():
            link.command(self._control_document(link.attempt))

    def _control_document(self, attempt: int) -> dict[str, Any]:
        document = self.faults.document() | {"windows": self.windows.entries()}
        if self.identity.control is None:
            return document
        return document | {"training": self.orders.document(attempt) | {"renewals": self.lease.renewals}}

    def _note_decision(self, order: StoredOrder) -> None:
        """Write what became of an order into the actions, which are events of the job."""
        self.scope.probe_client.actions.note(order.who, described(order))

    def take_updates(self) -> tuple[list[StoredStep], list[CurvePoint]]:
        """Return the steps and points of curves that were added since the last call."""
        updates = self._fresh_steps, self._fresh_points
        self._fresh_steps, self._fresh_points = [], []
        return updates
