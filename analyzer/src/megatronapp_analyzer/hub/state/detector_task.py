"""Detector in parallel with the event loop: finished steps in order, then liveness at every tick."""

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from megatronapp_analyzer.hub.ingest import step_totals
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.model import JobLayout, RankLiveness, StepRecords, Verdict

LOG = logging.getLogger(__name__)
MAX_WAITING = 2000
"""Number of steps that may wait for the detector; beyond it, the oldest are counted and not judged."""
BATCH = 32


class StepJudge(Protocol):
    """Judge of steps and liveness; `detect.engine.Detector` is the implementation."""

    def observe(self, step: StepRecords) -> list[Verdict]:
        """Judge one finished step."""

    def observe_liveness(self, now_ns: int, ranks: Sequence[RankLiveness]) -> list[Verdict]:
        """Judge which ranks make no progress."""


DetectorFactory = Callable[[JobLayout], StepJudge]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LivenessReport:
    """Ranks that have reported lately; `now_ns` is real time."""

    layout: JobLayout
    now_ns: int
    ranks: list[RankLiveness]


class DetectorTask:
    """Queue in front of the detector. One detector per layout: another layout begins with a fresh one."""

    def __init__(
        self,
        factory: DetectorFactory,
        book: VerdictStore,
        *,
        liveness: Callable[[], "LivenessReport | None"],
        real_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._factory = factory
        self._book = book
        self._liveness = liveness
        self._real_time_s = real_time_s
        self._waiting: deque[tuple[JobLayout, StoredStep]] = deque()
        self._wake = asyncio.Event()
        self._detector: StepJudge | None = None
        self._layout: JobLayout | None = None
        self.caught_up = False
        """True once the steps that were there at the start have been judged."""
        self.skipped = 0
        self.failures = 0
        self.lag_s: float | None = None
        self.wasted_s: dict[str, float] = {}
        """Rank-seconds lost by cause since the start."""
        self.imposed_s: dict[tuple[int, str], float] = {}
        """Seconds that each rank made others wait since the start, by kind of communicator."""

    def add(self, layout: JobLayout, steps: Iterable[StoredStep]) -> None:
        """Queue finished steps for the detector."""
        self._waiting.extend((layout, step) for step in steps)
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.skipped += 1
        if self._waiting:
            self._wake.set()

    async def run(self, tick_s: float) -> None:
        """Judge until cancelled. After a restart, the steps queued before show which old verdicts still hold."""
        while self._waiting:
            await self.drain_batch()
        self._book.clear_unreported(self._real_time_s())
        self.caught_up = True
        next_tick = time.monotonic()
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), max(0.0, next_tick - time.monotonic()))
            except TimeoutError:
                next_tick = time.monotonic() + tick_s
                await self._judge_liveness()
                continue
            await self.drain_batch()

    async def drain_batch(self) -> None:
        """Judge up to BATCH waiting steps."""
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        if not self._waiting:
            self._wake.clear()
        if not batch:
            return
        for afresh, verdicts in await asyncio.to_thread(self._judge, batch):
            if afresh:
                self._book.clear_all(self._real_time_s())
            self._book.update(verdicts)
            self._count_waste()
        newest = batch[-1][1].digest
        self.lag_s = max(0.0, self._real_time_s() - (newest.start_real_ns + newest.duration_ns) * 1e-9)

    def _judge(self, batch: Sequence[tuple[JobLayout, StoredStep]]) -> list[tuple[bool, list[Verdict]]]:
        """Return for each step if a fresh detector judged it (verdicts of an older one are over then) and its verdicts.

        A detector that fails is replaced; the hub must continue without it.
        """
        found = []
        for layout, step in batch:
            detector, afresh = self._prepare(layout)
            try:
                found.append((afresh, detector.observe(step.view)))
            except Exception:
                self.failures += 1
                self._detector = None
                found.append((afresh, []))
                LOG.exception("detector failed at attempt %d step %d; it starts afresh", *step.key)
            self._count_waits(step)
        return found

    def _count_waits(self, step: StoredStep) -> None:
        """Add the waits that a step's ranks impose; on an error the step is skipped, because verdicts matter more."""
        total = dict(self.imposed_s)
        try:
            found = step_totals.imposed_s(step) if len(step.view.records) else {}
        except Exception:
            self.failures += 1
            LOG.exception("waits of attempt %d step %d are not counted", *step.key)
            return
        for key, seconds in found.items():
            total[key] = total.get(key, 0.0) + seconds
        self.imposed_s = total  # replaced at once: a scrape reads it from another thread

    def _prepare(self, layout: JobLayout) -> tuple[StepJudge, bool]:
        """Return the detector for `layout`, and whether it replaces one that has judged."""
        if self._detector is not None and layout == self._layout:
            return self._detector, False
        replaces = self._layout is not None
        self._detector, self._layout = self._factory(layout), layout
        return self._detector, replaces

    async def _judge_liveness(self) -> None:
        if (heard := self._liveness()) is None:
            return
        detector, afresh = self._prepare(heard.layout)
        if afresh:
            self._book.clear_all(self._real_time_s())
        try:
            verdicts = await asyncio.to_thread(detector.observe_liveness, heard.now_ns, heard.ranks)
        except Exception:
            self.failures += 1
            LOG.exception("detector failed to judge liveness")
            return
        self._book.update(verdicts)

    def _count_waste(self) -> None:
        assert self._layout is not None
        for verdict in self._book.slowing():
            lost = verdict.seconds_per_step * self._layout.world
            self.wasted_s[str(verdict.cause)] = self.wasted_s.get(str(verdict.cause), 0.0) + max(0.0, lost)
