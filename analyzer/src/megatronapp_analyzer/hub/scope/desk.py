"""MegaScope's desk in the hub: takes what ranks send, keeps runs, and hands frames to pages.

Everything here runs on the hub's event loop. What a rank sends wrongly is counted and left out: its agent has more to
bring than that.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.scope import encode
from megatronapp_analyzer.hub.scope.headers import RunHeader, StepHeader, read
from megatronapp_analyzer.hub.scope.journal import Entry
from megatronapp_analyzer.hub.scope.merge import pieces_of
from megatronapp_analyzer.hub.scope.probes import ProbeBook
from megatronapp_analyzer.hub.scope.publishers import UNKNOWN, Publishers
from megatronapp_analyzer.hub.scope.ring import Ring
from megatronapp_analyzer.hub.scope.run import ENDED, Run
from megatronapp_analyzer.hub.scope.steps import ClosedStep, StepBook, number
from megatronapp_analyzer.hub.scope.viewers import Viewer
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import PROTOCOL
from megatronapp_common.scope.protocol_requests import (
    MAX_EXPRESSION,
    MAX_PINNED,
    MAX_PROMPTS,
    MAX_TOKENS,
    Capture,
)
from megatronapp_common.scope.reducers import NAMES

LOG = logging.getLogger(__name__)
RING_BYTES = 256 << 20
MAX_RUNS = 32
"""That are kept; the oldest that has ended goes first."""
PRESETS = {
    "default": Capture().model_dump(mode="json", by_alias=True),
    "lite": Capture(preset="lite").model_dump(mode="json", by_alias=True),
    "off": Capture(preset="off").model_dump(mode="json", by_alias=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScopeSettings:
    """What differs between desks."""

    job: str
    source: str = "live"
    ring_bytes: int = RING_BYTES
    runs: int = MAX_RUNS


class ScopeDesk:
    """State of MegaScope in one hub. `clock` gives seconds."""

    def __init__(self, settings: ScopeSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.publishers = Publishers()
        self.ring = Ring(settings.ring_bytes)
        self.runs: dict[str, Run] = {}
        self.probes = ProbeBook()
        self.errors = 0
        self.on_prefill: Callable[[Run], None] = lambda _: None
        """Called when the first step of a run has been shown."""
        self.state = "gone"
        self._clock = clock
        self._steps = StepBook()
        self._viewers: set[Viewer] = set()
        self.watched = asyncio.Event()
        """Set once a page looks."""
        self._timer: asyncio.TimerHandle | None = None
        self._ends: dict[str, Frame] = {}
        """States that are told once the last steps of their runs have been."""

    # ---- ranks

    def take(self, attempt: int, worker: int, frame: Frame) -> None:
        """One frame of a rank, as its agent passed it on."""
        with self._forgiving():
            self._take(attempt, worker, frame)
        self.close_due()

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except (ProtocolError, FrameError) as error:
            self.errors += 1
            LOG.warning("what a rank published is left out: %s", error)

    def _take(self, attempt: int, worker: int, frame: Frame) -> None:
        if frame.type == FrameType.SCOPE_PUBLISHER:
            self.publishers.add(frame.header, worker)
            self._set_state("ready", "The model answers.", "")
        elif attempt < self.publishers.attempt:
            return
        elif frame.type == FrameType.SCOPE_PART:
            self._take_part(frame)
        elif frame.type == FrameType.SCOPE_TOKENS:
            read(StepHeader, "TOKENS", frame.header)
            self._steps.add_tokens(_step_key(frame), frame, self._clock())
        elif frame.type == FrameType.SCOPE_RUN_STATE:
            self._take_state(frame)

    def _take_part(self, frame: Frame) -> None:
        publisher = self.publishers.ranks.get(number(frame.header, "rank"))
        if publisher is None or publisher.replica != 0:
            return
        pieces, more = pieces_of(frame, publisher.tp), bool(frame.header.get("more"))
        if frame.header.get("probe") is not None:
            self.probes.add(str(frame.header["probe"]), publisher.rank, pieces, more=more)
            self.probes.settle(self.publishers.expected())
        else:
            self._steps.add_part(_step_key(frame), publisher.rank, pieces, self._clock(), more=more)

    def present(self, model: Mapping[str, Any] | None, layout: Mapping[str, int]) -> None:
        """A model that answers from what was recorded."""
        self.publishers.model = None if model is None else dict(model)
        self.publishers.layout = dict(layout)
        self.state = "ready"

    def _take_state(self, frame: Frame) -> None:
        """A RUN_STATE frame; the end of a run waits until its last steps have been shown."""
        said = read(RunHeader, "RUN_STATE", frame.header)
        if said.state in ENDED and self._steps.waits(said.run):
            self._ends[said.run] = frame
        else:
            self.take_state(frame)

    def take_state(self, frame: Frame) -> Run:
        """A run has another state. Raises ProtocolError."""
        run = read(RunHeader, "RUN", frame.header).run
        known = self.runs.get(run) or Run(run, self.ring)
        entry = known.set_state(frame.header)
        self.runs[run] = known
        self._forget_runs()
        self.publish(entry)
        return known

    def _forget_runs(self) -> None:
        while len(self.runs) > self.settings.runs:
            oldest = next((run for run in self.runs.values() if run.ended), next(iter(self.runs.values())))
            self.runs.pop(oldest.id).close()
            self._steps.forget(oldest.id)

    def lost(self, attempt: int, worker: int) -> None:
        """The agent of a worker went away, and with it its ranks."""
        if self.publishers.remove(attempt, worker):
            self._set_state("restarting", "Ranks of the model are away.", "Pictures come again once they are back.")
            self.close_due()

    def _set_state(self, state: str, message: str, hint: str) -> None:
        if state == self.state:
            return
        self.state = state
        queue = sum(run.header.get("state") == "queued" for run in self.runs.values())
        header = {"state": state, "message": message, "hint": hint, "queue": queue}
        whole = frames.encode(Frame(FrameType.SCOPE_STATE, header))
        self.publish(Entry("", 0, FrameType.SCOPE_STATE, 0, whole, whole))

    def close(self) -> None:
        """No timer goes on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- steps

    def close_due(self) -> None:
        """Show steps that are ready, and come back when the next may be."""
        for step in self._steps.close(self.publishers.expected(), self._clock()):
            with self._forgiving():
                self._show(step)
        for run in [run for run in self._ends if not self._steps.waits(run)]:
            with self._forgiving():
                self._take_state(self._ends.pop(run))
        self._come_back()

    def _come_back(self) -> None:
        self.close()
        due = self._steps.due_s()
        with contextlib.suppress(RuntimeError):  # without a loop, whoever feeds the desk looks after the time, too
            loop = asyncio.get_running_loop()
            if due is not None:
                self._timer = loop.call_later(max(0.001, due - self._clock()), self.close_due)

    def _show(self, step: ClosedStep) -> None:
        run = self.runs.get(step.run)
        if run is None:
            raise ProtocolError("no-run", "nobody has told its state")
        layers = self.publishers.model["layers"] if self.publishers.model else None
        tables = encode.tables_of(step.pieces, layers)
        rows = encode.attention_rows(step.pieces)
        if step.step == 0:
            self._publish_all(run.journal.append(one) for one in encode.overview_frames(step, tables, layers))
            for sample, layer, head, position, codes in rows:
                run.attention.put((sample, layer, head), [position], codes.reshape(1, -1).copy())
        self.publish(run.add_step(encode.step_frame(step, tables)))
        if step.step == 0:
            self.on_prefill(run)
        else:
            self._publish_all(run.add_rows(one) for one in encode.rows_frames(step.run, step.step, rows))
        captured = (run.header.get("capture") or {}).get("preset") != "off"
        if step.missing and captured:
            self.publish(run.journal.append(_late_ranks(step)))

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

    def publish(self, entry: Entry) -> None:
        """Hand a frame to every page; never waits."""
        for viewer in self._viewers:
            viewer.push(entry)

    def _publish_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.publish(entry)

    def publish_frame(self, run: Run, frame: Frame) -> None:
        """Add a frame to a run, and show it."""
        self.publish(run.journal.append(frame))

    def resume(self, viewer: Viewer, run: str, seq: int) -> None:
        """Send a page again what came after `seq`; all of it if the hub has begun anew since."""
        if (known := self.runs.get(run)) is None:
            return
        entries = list(known.journal.after(seq))
        if not entries and seq > known.journal.newest:
            entries = list(known.journal.after(0))
        viewer.outbox.resume(run, entries)
        viewer.wake.set()

    def hello(self, role: str) -> dict[str, Any]:
        """Header of SCOPE_HELLO."""
        return {
            "protocol": PROTOCOL,
            "role": role,
            "job": self.settings.job,
            "source": self.settings.source,
            "state": self.state,
            "model": self.publishers.model,
            "layout": self.publishers.layout,
            "limits": {
                "prompts": MAX_PROMPTS,
                "tokens": MAX_TOKENS,
                "pinnedHeads": MAX_PINNED,
                "ringBytes": self.settings.ring_bytes,
                "expressionLength": MAX_EXPRESSION,
            },
            "presets": PRESETS,
            "reducers": list(NAMES),
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


def _late_ranks(step: ClosedStep) -> Frame:
    ranks = [rank for rank in step.missing if rank != UNKNOWN]
    span = {"what": "ranks", "from": step.step, "to": step.step}
    return Frame(FrameType.SCOPE_GAP, {"run": step.run, **span, "ranks": ranks, "reason": "late"})
