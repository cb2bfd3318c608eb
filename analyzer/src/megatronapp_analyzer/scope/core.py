"""MegaScope's desk in the hub: takes what ranks send, keeps runs, and hands frames to pages.

Everything here runs on the hub's event loop. What a rank sends wrongly is counted and left out: its agent has more to
bring than that.
"""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.delivery.page_socket import Viewer
from megatronapp_analyzer.scope.ingest.engine_liveness import LEADER, EngineLiveness, lost_run
from megatronapp_analyzer.scope.parts.merge import PCA, MergedTensor, shard_tensors_of
from megatronapp_analyzer.scope.parts.part_tracker import part_of
from megatronapp_analyzer.scope.parts.probe_tracker import ProbeTracker, ranks_disconnected
from megatronapp_analyzer.scope.parts.step_assembler import ClosedStep, ScopeStepAssembler, number
from megatronapp_analyzer.scope.parts.wire_models import RunHeader, StepHeader, read
from megatronapp_analyzer.scope.store.frame_log import LogEntry
from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget
from megatronapp_analyzer.scope.store.publishers import UNKNOWN, PublisherRegistry
from megatronapp_analyzer.scope.store.run import ENDED, ScopeRun
from megatronapp_analyzer.scope.views import encode
from megatronapp_analyzer.scope.views.encode import AttentionRow
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.filters.reducers import NAMES
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import PROTOCOL
from megatronapp_common.scope.protocol_requests import (
    MAX_EXPRESSION,
    MAX_PINNED,
    CaptureSettings,
    StateSelection,
)

LOG = logging.getLogger(__name__)
RING_BYTES = 256 << 20
MAX_RUNS = 32
"""That are kept; the oldest that has ended goes first."""
MAX_FORGOTTEN = 1024
READY = "The model answers.", ""
PRESETS = {
    "default": CaptureSettings().model_dump(mode="json", by_alias=True),
    "lite": CaptureSettings(preset="lite", states=StateSelection(mlp1=False)).model_dump(mode="json", by_alias=True),
    "off": CaptureSettings(
        preset="off", states=StateSelection(qkv=False, attention=False, mlp1=False, mlp2=False, pca=False)
    ).model_dump(mode="json", by_alias=True),
}
"""With the states that each of them shows at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScopeSettings:
    """What differs between desks."""

    job: str
    source: str = "live"
    ring_bytes: int = RING_BYTES
    runs: int = MAX_RUNS


class ScopeRegistry:
    """State of MegaScope in one hub. `clock` gives seconds."""

    def __init__(self, settings: ScopeSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.publishers = PublisherRegistry()
        self.ring = MemoryBudget(settings.ring_bytes)
        self.runs: dict[str, ScopeRun] = {}
        self.probes = ProbeTracker()
        self.errors = 0
        self.on_prefill: Callable[[ScopeRun], None] = lambda _: None
        """Called when the first step of a run has been shown."""
        self.state = "gone"
        self.boot = secrets.token_hex(6)
        """Of this life of the hub: numbers of frames, and all that is held, begin anew with it."""
        self._ranks_told: list[Any] = []
        """What of the model each rank has, as pages know it."""
        self.on_hole: Callable[[ScopeRun], None] = lambda _: None
        """Called when tokens of a run have not been seen here."""
        self.on_engine: Callable[[], None] = lambda: None
        """Called when rank 0 is there, or there again."""
        self.on_basis: Callable[[ScopeRun], None] = lambda _: None
        """Called before the first coordinates of a basis that the run has not been told of are shown."""
        self.on_coordinates: Callable[[ScopeRun], None] = lambda _: None
        """Called when a step of a run with coordinates has been shown, and when it has ended."""
        self.pca_version = 0
        """Of the newest basis; coordinates in another one are left out."""
        self.pca_seen = 0
        """The largest that ranks have named: another hub may have given them a basis before."""
        self.clock = clock
        self._engine = EngineLiveness()
        self._steps = ScopeStepAssembler()
        self._viewers: set[Viewer] = set()
        self.watched = asyncio.Event()
        """Set once a page looks."""
        self._timer: asyncio.TimerHandle | None = None
        self._ends: dict[str, Frame] = {}
        """States that are told once the last steps of their runs have been."""
        self._wanted: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        """Runs that somebody waits for."""
        self._forgotten: deque[str] = deque(maxlen=MAX_FORGOTTEN)
        """Runs that are not kept any more: an agent that comes back tells that they have ended once more."""

    # ---- ranks

    def take_frame(self, attempt: int, worker: int, frame: Frame) -> None:
        """One frame of a rank, as its agent passed it on."""
        with self._forgiving():
            self._take(attempt, worker, frame)
        self.close_due()

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except (ProtocolError, FrameError) as error:
            self._count_error(error)

    def _count_error(self, error: Exception) -> None:
        self.errors += 1
        LOG.warning("what a rank published is left out: %s", error)

    def _take(self, attempt: int, worker: int, frame: Frame) -> None:
        if frame.type == FrameType.SCOPE_PUBLISHER:
            self._take_publisher(worker, frame)
        elif attempt < self.publishers.attempt:
            return
        elif frame.type == FrameType.SCOPE_LEFT:
            self._on_ranks_lost(self.publishers.remove(attempt, worker, number(frame.header, "rank")), for_good=True)
        elif frame.type == FrameType.SCOPE_PART:
            self._take_part(frame)
        elif frame.type == FrameType.SCOPE_TOKENS:
            read(StepHeader, "TOKENS", frame.header)
            self._steps.add_tokens(_step_key(frame), frame, self.clock())
        elif frame.type == FrameType.SCOPE_RUN_STATE:
            self._take_state(frame)

    def _take_publisher(self, worker: int, frame: Frame) -> None:
        before = self.publishers.attempt
        self.publishers.add(frame.header, worker)
        if self.publishers.attempt > before >= 0:
            self._fail_open()
        if LEADER in self.publishers.ranks:
            self._engine.mark_alive()
            self._set_state("ready", *READY)
        self._publish_layout()
        if frame.header.get("rank") == LEADER:
            self.on_engine()

    def _take_part(self, frame: Frame) -> None:
        publisher = self.publishers.ranks.get(number(frame.header, "rank"))
        if publisher is None or publisher.replica != 0:
            return
        pieces, part = shard_tensors_of(frame, publisher.tp), part_of(publisher.rank, frame.header)
        self.pca_seen = max([self.pca_seen, *(one.version for one in pieces if one.version is not None)])
        if frame.header.get("probe") is not None:
            self.probes.add(str(frame.header["probe"])[:64], pieces, self.clock(), part)
            self.probes.settle(self.publishers.expected(), self.clock())
        else:
            self._steps.add_part(_step_key(frame), pieces, self.clock(), part)

    def present(self, model: Mapping[str, Any] | None, layout: Mapping[str, int]) -> None:
        """A model that answers from what was recorded."""
        self.publishers.model = None if model is None else dict(model)
        self.publishers.layout = dict(layout)
        self.state = "ready"

    def _take_state(self, frame: Frame) -> None:
        """A RUN_STATE frame; the end of a run waits until its last steps have been shown. Agents tell it again."""
        said = read(RunHeader, "RUN_STATE", frame.header)
        if self._is_old(said):
            return
        ended, late = said.state in ENDED, said.run not in self.runs and said.state not in {"queued", "prefill"}
        if ended:
            self._steps.end(said.run)
        else:
            self._steps.reopen(said.run)
            self._ends.pop(said.run, None)
        if ended and self._steps.waits(said.run):
            self._ends[said.run] = frame
            return
        run = self.take_state(frame)
        run.late |= late or (ended and (said.steps or 0) > run.steps)
        if run.late:
            self.on_hole(run)
        if ended:
            self.on_coordinates(run)

    def _is_old(self, said: RunHeader) -> bool:
        """Whether this is known: of a run that stands so here, or that has ended and is not kept any more."""
        known = self.runs.get(said.run)
        if known is None:
            return said.state in ENDED and said.run in self._forgotten
        told = known.is_current_state(said)
        if told and known.late:
            self.on_hole(known)
        return told

    def take_run_state(self, frame: Frame) -> None:
        """A RUN_STATE that rank 0 has told the hub itself."""
        with self._forgiving():
            self._take_state(frame)
        self.close_due()

    def take_state(self, frame: Frame) -> ScopeRun:
        """A run has another state. Raises ProtocolError."""
        run = read(RunHeader, "RUN", frame.header).run
        known = self.runs.get(run) or ScopeRun(run, self.ring)
        entry = known.set_state(frame.header)
        self.runs[run] = known
        if (wanted := self._wanted.pop(run, None)) is not None:
            wanted.set()
        self._forget_runs()
        self.publish(entry)
        return known

    async def known(self, run: str) -> None:
        """Until the state of a run has been told."""
        if run not in self.runs:
            await self._wanted.setdefault(run, asyncio.Event()).wait()

    def _forget_runs(self) -> None:
        while len(self.runs) > self.settings.runs:
            oldest = next((run for run in self.runs.values() if run.ended), next(iter(self.runs.values())))
            self.runs.pop(oldest.id).close()
            self._steps.forget(oldest.id)
            self._ends.pop(oldest.id, None)
            self._forgotten.append(oldest.id)

    def on_attempt(self, attempt: int) -> None:
        """An agent of this attempt is there: the model of an older one is not."""
        if self.publishers.attempt >= 0 and self.publishers.begin(attempt):
            self._on_ranks_lost([LEADER], for_good=True)

    def on_agent_lost(self, attempt: int, worker: int, *, for_good: bool = False) -> None:
        """The agent of a worker went away, and with it its ranks; for good if it said that they have ended."""
        self._on_ranks_lost(self.publishers.remove(attempt, worker), for_good=for_good)

    def _on_ranks_lost(self, ranks: Sequence[int], *, for_good: bool) -> None:
        if not ranks:
            return
        self._set_state("restarting", "Ranks of the model are away.", "Pictures come again once they are back.")
        if LEADER in ranks and for_good:
            self._fail_open()
        elif LEADER in ranks:
            self._engine.mark_lost(self.clock())
        self.probes.clear(ranks_disconnected)
        self.close_due()

    def _fail_open(self) -> None:
        """Rank 0 will never tell the end of what it was doing."""
        self._engine.mark_alive()
        self.probes.clear()
        for run in [run for run in self.runs.values() if not run.ended and run.id not in self._ends]:
            with self._forgiving():
                self._take_state(lost_run(run.header))

    def _set_state(self, state: str, message: str, hint: str) -> None:
        if state != self.state:
            self.state = state
            self._publish_state(message, hint)

    def _publish_layout(self) -> None:
        """Pages that came before all ranks had begun know the number of stages only."""
        ranks = self.publishers.reported_layout().get("ranks", [])
        if ranks and ranks != self._ranks_told:
            self._publish_state(*READY)

    def _publish_state(self, message: str, hint: str) -> None:
        queue = sum(run.header.get("state") == "queued" for run in self.runs.values())
        layout = self.publishers.reported_layout()
        self._ranks_told = layout.get("ranks", [])
        header = {"state": self.state, "message": message, "hint": hint, "queue": queue, "layout": layout}
        whole = frames.encode(Frame(FrameType.SCOPE_STATE, header))
        self.publish(LogEntry("", 0, FrameType.SCOPE_STATE, 0, whole, whole))

    def close(self) -> None:
        """No timer goes on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- steps

    def close_due(self) -> None:
        """Show steps that are ready, and come back when the next may be."""
        if self._engine.take_timeout(self.clock()):
            self._fail_open()
        for step in self._steps.close(self.publishers.expected(), self.clock()):
            with self._forgiving():
                self._show(step)
        for run in [run for run in self._ends if not self._steps.waits(run)]:
            with self._forgiving():
                self._take_state(self._ends.pop(run))
        self._schedule_close()

    def _schedule_close(self) -> None:
        self.close()
        due = min((one for one in (self._steps.due_s(), self._engine.due_s()) if one is not None), default=None)
        with contextlib.suppress(RuntimeError):  # without a loop, whoever feeds the desk looks after the time, too
            loop = asyncio.get_running_loop()
            if due is not None:
                self._timer = loop.call_later(max(0.001, due - self.clock()), self.close_due)

    def _show(self, step: ClosedStep) -> None:
        run = self.runs.get(step.run)
        if run is None:
            self._steps.forget(step.run)
            raise ProtocolError("no-run", "nobody has told its state")
        if step.first < step.step:
            self._publish_gap(run, "step", (step.first, step.step - 1), "restart" if run.late else "late")
            self.on_hole(run)
        if step.tokens is None:
            self._publish_gap(run, "step", (step.step, step.step), "late")
            self.on_hole(run)
            return
        for what, span, ranks, reason in gaps_of(step, captured=run.captured):
            self._publish_gap(run, what, span, reason, ranks)
        self._show_numbers(run, step, step.tokens)

    def _show_numbers(self, run: ScopeRun, step: ClosedStep, tokens: Frame) -> None:
        layers = self.publishers.model["layers"] if self.publishers.model else None
        tables, rows = self._read(run, step, layers)
        if step.step == 0:
            frames_of_prompts = encode.overview_frames(step, tables, layers, run.pca_version)
            self._publish_all(run.journal.append(one) for one in frames_of_prompts)
            for sample, layer, head, position, codes in rows:
                run.attention.put((sample, layer, head), [position], codes.reshape(1, -1).copy())
        frame, left_out = encode.step_frame(step, tokens, tables, run.pca_version)
        self.publish(run.add_step(frame))
        if left_out:
            self._publish_gap(run, "step", (step.step, step.step), "large", tensors=left_out)
        if step.step == 0:
            self.on_prefill(run)
        else:
            self._publish_all(run.add_rows(one) for one in encode.rows_frames(step.run, step.step, rows))
        if PCA in tables:
            run.pca_rows.update(tables[PCA].rows)
            self.on_coordinates(run)

    def _read(
        self, run: ScopeRun, step: ClosedStep, layers: int | None
    ) -> tuple[dict[str, MergedTensor], list[AttentionRow]]:
        """What ranks sent of a step; nothing if it makes no sense, for its tokens are shown all the same."""
        if run.pca_version != self.pca_version and any(one.version == self.pca_version for one in step.tensors):
            self.on_basis(run)
        known = [one for one in step.tensors if one.tensor.name != PCA or one.version == run.pca_version]
        try:
            return encode.tables_of(known, layers), encode.attention_rows(known)
        except ProtocolError as error:
            self._count_error(error)
            self._publish_gap(run, "step", (step.step, step.step), "late")
            return {}, []

    def _publish_gap(
        self,
        run: ScopeRun,
        what: str,
        span: tuple[int, int],
        reason: str,
        ranks: Sequence[int] = (),
        *,
        tensors: Sequence[str] = (),
    ) -> None:
        header = {"run": run.id, "what": what, "from": span[0], "to": span[1], "ranks": list(ranks), "reason": reason}
        named = {"tensors": list(tensors)} if tensors else {}
        self.publish_frame(run, Frame(FrameType.SCOPE_GAP, header | named))

    # ---- pages

    def subscribe(self) -> Viewer:
        """A page that gets everything from now on."""
        viewer = Viewer()
        self._viewers.add(viewer)
        self.watched.set()
        return viewer

    def unsubscribe(self, viewer: Viewer) -> None:
        """Forget a page."""
        self._viewers.discard(viewer)

    def publish(self, entry: LogEntry) -> None:
        """Hand a frame to every page; never waits."""
        for viewer in self._viewers:
            viewer.push(entry)

    def _publish_all(self, entries: Iterable[LogEntry]) -> None:
        for entry in entries:
            self.publish(entry)

    def publish_frame(self, run: ScopeRun, frame: Frame) -> None:
        """Add a frame to a run, and show it."""
        self.publish(run.journal.append(frame))

    def resume(self, viewer: Viewer, run: str, seq: int) -> None:
        """Send a page again what came after `seq`; all of it if the hub has begun anew since."""
        if (known := self.runs.get(run)) is None:
            return

        def replay() -> list[LogEntry]:
            return known.journal.after(seq if seq <= known.journal.newest else 0)

        viewer.outbox.resume(run, replay)
        viewer.wake.set()

    def hello(self, role: str) -> dict[str, Any]:
        """Header of SCOPE_HELLO."""
        return {
            "protocol": PROTOCOL,
            "boot": self.boot,
            "role": role,
            "job": self.settings.job,
            "source": self.settings.source,
            "state": self.state,
            "model": self.publishers.model,
            "layout": self.publishers.reported_layout(),
            "limits": {
                **self.publishers.limits,
                "pinnedHeads": MAX_PINNED,
                "ringBytes": self.settings.ring_bytes,
                "expressionLength": MAX_EXPRESSION,
            },
            "presets": PRESETS,
            "reducers": list(NAMES),
            "sites": sorted(self.publishers.sites),
            "runs": [run.summary() for run in reversed(self.runs.values())],
        }

    def hello_frame(self, role: str) -> bytes:
        """SCOPE_HELLO."""
        return frames.encode(Frame(FrameType.SCOPE_HELLO, self.hello(role)))


def _step_key(frame: Frame) -> tuple[str, int]:
    run = frame.header.get("run")
    if not isinstance(run, str) or not 1 <= len(run) <= 64:
        raise ProtocolError("bad-frame", "run is not a short text")
    return run, number(frame.header, "step")


def gaps_of(step: ClosedStep, *, captured: bool) -> Iterator[tuple[str, tuple[int, int], list[int], str]]:
    """What is missing of a step, for GAPs. `captured`: ranks were asked for more than tokens."""
    span = (step.step, step.step)
    if step.dropped:
        yield "ranks", span, list(step.dropped), "slow"
    if captured and (late := set(step.missing) - set(step.dropped)):
        yield "ranks", span, sorted(rank for rank in late if rank != UNKNOWN), "late"
