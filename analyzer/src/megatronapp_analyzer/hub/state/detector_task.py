"""Queue in front of the detector, which works apart from the event loop: finished steps in order, then liveness.

A detector that is lost is started again, and learns from the steps that the hub stores. Until it has judged them,
the verdicts of the lost detector are stale.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from megatronapp_analyzer.align.step_clocks import ClockReading
from megatronapp_analyzer.errors import JudgeLostError
from megatronapp_analyzer.hub.ingest.store import StepKey, StoredStep
from megatronapp_analyzer.hub.judge.judging import Judgement, LivenessReport
from megatronapp_analyzer.hub.judge.learned import LearnedVerdicts
from megatronapp_analyzer.hub.judge.links import JudgeLink
from megatronapp_analyzer.hub.state.totals import WasteSums
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.model import JobLayout, Verdict, VerdictState

LOG = logging.getLogger(__name__)
MAX_WAITING = 2000
"""Number of steps that may wait for the detector; beyond it, the oldest are not judged, and counted if they are new."""
MAX_WAITING_BYTES = 256 << 20
"""Bytes of the records of steps that wait, which the store may have deleted meanwhile; at least one step waits."""
BATCH = 32
FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 30.0
"""Pauses before a lost detector is started again: each is twice the one before, up to the last."""
STEADY_S = 60.0
"""Life of a detector after which its loss is taken for a single event: the next pause is the first again."""
OUT_LOSSES = 6
"""Losses in a row, none of a detector that had caught up, from which on it is taken for out of order."""
HANG_SETTLE_S = 5.0
"""Time of reports of all ranks in which a detector reports the hangs that last: the hang of a lost one is over then."""
HANG_PATIENCE_S = 60.0
"""The same if ranks do not report."""
FATAL_TIMES = 2
"""Number of times that the detector may be lost at a step until this step is not judged any more."""


class ClockReader(Protocol):
    """Reader of the clocks that the detector's process has estimated; `TraceIngest` is the implementation."""

    def take_reading(self, reading: ClockReading) -> None:
        """Take the clocks at a step."""

    def forget_readings(self) -> None:
        """Forget the clocks, because their source is lost."""


WaitingStep = tuple[JobLayout, StoredStep]
T = TypeVar("T")


class DetectorTask:
    """Queue in front of the detector, and what the hub knows of its state."""

    def __init__(
        self,
        judge: JudgeLink,
        book: VerdictStore,
        *,
        liveness: Callable[[], LivenessReport | None],
        stored: Callable[[], Iterable[WaitingStep]] = tuple,
        clocks: ClockReader | None = None,
        waste: WasteSums | None = None,
        real_time_s: Callable[[], float] = time.time,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Create the queue. `stored`: steps in memory of the newest attempt, which a fresh detector learns from."""
        self._judge = judge
        self._book = book
        self._liveness = liveness
        self._stored = stored
        self._clocks = clocks
        self._waste = WasteSums(None) if waste is None else waste
        self._real_time_s = real_time_s
        self._first_pause_s = first_pause_s
        self._waiting: deque[WaitingStep] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        # Of its own: requests may fill the executor that the event loop has for all.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="detector")
        self._devices = 0
        self._counted: StepKey = (-1, -1)
        """Newest step whose waste and waits were counted, here or by an earlier hub: none is added twice."""
        self._judged: StepKey | None = None
        """Step that the detector judges now."""
        self._fatal: dict[StepKey, int] = {}
        """Number of losses of the detector at a step."""
        self._not_judged: set[StepKey] = set()
        self._learned = LearnedVerdicts()
        self._losses_in_row = 0
        self._caught_up_s = 0.0
        self._all_reported_s: float | None = None
        """Real time of the first report of all ranks after this detector has caught up."""
        self.caught_up = False
        """True once the steps that were there when the detector was started have been judged."""
        self.skipped = 0
        self.failures = 0
        self.restarts = 0
        self.lag_s: float | None = None
        self._counted_s: dict[str, float] = {}
        """Most seconds lost that each verdict has been counted with."""
        self.imposed_s: dict[tuple[int, str], float] = {}
        """Seconds that each rank made others wait since the start, by kind of communicator."""

    @property
    def is_out(self) -> bool:
        """Return true if the detector could not be started for some time: nothing is judged until it can."""
        return self._losses_in_row >= OUT_LOSSES

    @property
    def wasted_s(self) -> dict[str, float]:
        """Return the GPU-seconds lost by cause since the job began; of ranks, where none uses a GPU."""
        return self._waste.by_cause

    def add_again(self, layout: JobLayout, steps: Sequence[StoredStep]) -> None:
        """Queue steps that an earlier hub has counted: the detector learns from them."""
        self._counted = max([self._counted, *(step.key for step in steps)])
        self.add(layout, steps)

    def add(self, layout: JobLayout, steps: Iterable[StoredStep]) -> None:
        """Queue finished steps for the detector."""
        for step in steps:
            self._waiting.append((layout, step))
            self._waiting_bytes += step.view.records.nbytes
        while len(self._waiting) > MAX_WAITING or (self._waiting_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1):
            _, oldest = self._pop()
            self.skipped += oldest.key > self._counted
        if self._waiting:
            self._wake.set()

    def _pop(self) -> WaitingStep:
        layout, step = self._waiting.popleft()
        self._waiting_bytes -= step.view.records.nbytes
        return layout, step

    async def run(self, tick_s: float) -> None:
        """Judge until cancelled; a detector that is lost is started again."""
        pause_s = self._first_pause_s
        # Of a new job nothing is unknown while the detector starts.
        self.caught_up = not self._waiting and not self._book.has_stale
        try:
            while True:
                begun = time.monotonic()
                try:
                    await self._run_once(tick_s)
                except JudgeLostError as error:
                    if time.monotonic() - begun > STEADY_S:
                        pause_s = self._first_pause_s
                    self._note_loss(error, pause_s)
                await self._in_thread(self._judge.close)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                self.restarts += 1
        finally:
            self._judge.stop()  # so that closing it, which may wait for the process, does not take long
            closing = asyncio.get_running_loop().run_in_executor(self._executor, self._judge.close)
            self._executor.shutdown(wait=False)
            await asyncio.shield(closing)

    async def _run_once(self, tick_s: float) -> None:
        """Start the detector, let it catch up, then judge until it is lost. Raises JudgeLostError.

        After a restart, the steps queued before show which old verdicts still hold.
        """
        self._judge.start()
        await self._in_thread(self._judge.wait_until_ready)
        last = self._waiting[-1][1].key if self._waiting else None
        while last is not None and self._waiting and self._waiting[0][1].key <= last:
            await self.drain_batch()
        self._publish_learned()
        self._caught_up_s, self._all_reported_s = self._real_time_s(), None
        self._book.clear_unreported(self._caught_up_s, hangs=False)  # hangs are in no step: later reports show them
        self.caught_up = True
        self._losses_in_row = 0
        await self._judge_steadily(tick_s)

    async def _judge_steadily(self, tick_s: float) -> None:
        next_tick = time.monotonic()
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), max(0.0, next_tick - time.monotonic()))
            except TimeoutError:
                next_tick = time.monotonic() + tick_s
                await self._judge_liveness()
                continue
            await self.drain_batch()

    def _note_loss(self, error: JudgeLostError, pause_s: float) -> None:
        """Mark what the lost detector has reported as unknown, and queue the stored steps for the next."""
        LOG.error("%s; it is started again in %g s and learns from the steps in memory", error, pause_s)
        self.caught_up = False
        self._losses_in_row += 1
        self.lag_s = None
        self._learned.clear()
        self._counted_s.clear()
        if self._clocks is not None:
            self._clocks.forget_readings()
        self._book.suspend()
        missed = {step.key for _, step in self._waiting}
        if self._judged is not None:
            missed.add(self._judged)
            self._fatal[self._judged] = self._fatal.get(self._judged, 0) + 1
            self._judged = None
        self._waiting.clear()
        self._waiting_bytes = 0
        self._forbid_fatal_steps()
        for layout, step in self._stored():
            missed.discard(step.key)
            if step.key not in self._not_judged:
                self.add(layout, [step])
        self.skipped += sum(key > self._counted for key in missed - self._not_judged)

    def _forbid_fatal_steps(self) -> None:
        """Exclude the steps at which the detector was lost too often."""
        for key in {key for key, times in self._fatal.items() if times >= FATAL_TIMES} - self._not_judged:
            self._not_judged.add(key)
            self.failures += 1
            LOG.error("attempt %d step %d is not judged: the detector was lost at it more than once", *key)

    async def drain_batch(self) -> None:
        """Judge up to BATCH waiting steps. Raises JudgeLostError."""
        for _ in range(min(BATCH, len(self._waiting))):
            layout, step = self._pop()
            self._devices, self._judged = layout.devices or layout.world, step.key
            judgement = await self._in_thread(self._judge.judge, layout, step)
            self._judged = None
            self._take(judgement, step.key)
            if judgement.clocks is not None and self._clocks is not None:
                self._clocks.take_reading(judgement.clocks)
            again = step.key <= self._counted
            self._count_waste(judgement.verdicts, again=again)
            if not again:
                self._counted = step.key
                self._count_waits(judgement.imposed_s)
            digest = step.digest
            self.lag_s = max(0.0, self._real_time_s() - (digest.start_real_ns + digest.duration_ns) * 1e-9)
        if not self._waiting:
            self._wake.clear()

    async def _judge_liveness(self) -> None:
        if (report := self._liveness()) is not None:
            self._take(await self._in_thread(self._judge.judge_liveness, report), self._counted)
        if self._book.has_stale:
            self._settle_hangs(report)

    def _settle_hangs(self, report: LivenessReport | None) -> None:
        """Clear hangs of a lost detector that this one has had the time to report again."""
        now_s = self._real_time_s()
        if self._all_reported_s is None and report is not None and len(report.ranks) >= report.layout.world:
            self._all_reported_s = now_s
        settled = self._all_reported_s is not None and now_s - self._all_reported_s >= HANG_SETTLE_S
        if settled or now_s - self._caught_up_s >= HANG_PATIENCE_S:
            self._book.clear_unreported(now_s)

    def _take(self, judgement: Judgement, key: StepKey) -> None:
        if judgement.afresh:
            self._publish_learned()
            self._counted_s.clear()
            self._book.clear_all(self._real_time_s())
        if self.caught_up:
            self._book.update(judgement.verdicts)
        else:
            self._learned.add(key, judgement.verdicts)
        self.failures += judgement.failures

    def _publish_learned(self) -> None:
        self._book.continue_older(self._learned.match(self._book.stale()))
        self._book.update(self._learned.newest.values())
        self._learned.clear()

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what `function` returns in a thread; if cancelled, end the detector, so that the thread ends, too."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._judge.stop()
            await asyncio.gather(running, return_exceptions=True)
            raise

    def _count_waits(self, waits: Mapping[tuple[int, str], float]) -> None:
        total = dict(self.imposed_s)
        for key, seconds in waits.items():
            total[key] = total.get(key, 0.0) + seconds
        self.imposed_s = total  # replaced at once: a scrape reads it from another thread

    def _count_waste(self, verdicts: Iterable[Verdict], *, again: bool) -> None:
        """Add what verdicts have cost since they were counted; a suspect counts once it is confirmed.

        `again`: a step that an earlier detector has judged, whose cost is counted already.
        """
        found_s: dict[str, float] = {}
        for verdict in verdicts:
            if verdict.state is VerdictState.SUSPECT:
                continue
            before_s = self._counted_s.get(verdict.id, 0.0)
            lost_s = max(verdict.seconds_lost - before_s, 0.0)
            # It may fall: steps that were not replayed are valued at a mean, which moves.
            self._counted_s[verdict.id] = before_s + lost_s
            if not again:
                cause = str(verdict.cause)
                found_s[cause] = found_s.get(cause, 0.0) + lost_s * self._devices
            if verdict.state is VerdictState.CLEARED:
                del self._counted_s[verdict.id]
        self._waste.add(found_s)
