"""Judgement of steps and of liveness, in whichever process it runs. No sockets, files or clock."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megatronapp_analyzer.align.clocks import AlignedStep, ClockAligner
from megatronapp_analyzer.align.step_clocks import ClockReading, needs_reading, reading_of
from megatronapp_analyzer.graph import waits
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.part_threads import ALONE, PartThreads
from megatronapp_analyzer.hub.ingest.step_totals import imposed_s
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.model import JobLayout, RankLiveness, StepRecords, Verdict

LOG = logging.getLogger(__name__)


class StepJudge(Protocol):
    """Judge of steps and liveness; `detect.engine.Detector` is the implementation."""

    def observe(self, step: StepRecords, aligned: AlignedStep | None = None) -> list[Verdict]:
        """Judge one finished step; `aligned`: the same step, if its clocks are aligned."""

    def observe_liveness(self, now_ns: int, ranks: Sequence[RankLiveness]) -> list[Verdict]:
        """Judge which ranks make no progress."""


DetectorFactory = Callable[[JobLayout], StepJudge]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LivenessReport:
    """Ranks that have reported lately; `now_ns` is real time."""

    layout: JobLayout
    now_ns: int
    ranks: list[RankLiveness]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Result of one step or one report of liveness."""

    afresh: bool
    """True if a fresh detector judged it: verdicts of the one before are over."""
    verdicts: list[Verdict]
    imposed_s: Mapping[tuple[int, str], float] = dataclasses.field(default_factory=dict)
    """Seconds that each rank made others wait in the step, by kind of communicator."""
    clocks: ClockReading | None = None
    """Clocks at the step; None where they need no check."""
    failures: int = 0


class StepJudging:
    """Detector of the current layout: another layout begins with a fresh one, and so does one that has failed."""

    def __init__(self, factory: DetectorFactory, threads: PartThreads = ALONE) -> None:
        """Create it without a detector. `threads`: those that judge a large step."""
        self._factory = factory
        self._threads = threads
        self._detector: StepJudge | None = None
        self._layout: JobLayout | None = None
        self._aligner: tuple[int, JobLayout, ClockAligner] | None = None

    def judge(self, layout: JobLayout, step: StoredStep) -> Judgement:
        """Judge a finished step."""
        detector, afresh = self._prepare(layout)
        failures, verdicts = 0, []
        matched = MatchedStep(step.view)
        aligned = None
        try:
            aligned = self._align(layout, matched)
        except Exception:
            failures += 1
            LOG.exception("clocks of attempt %d step %d are not known", *step.key)
        waits = self._begin_waits(step, matched, aligned)
        try:
            verdicts = detector.observe(step.view, aligned)
        except Exception:
            failures += 1
            self._detector = None
            LOG.exception("detector failed at attempt %d step %d; it starts afresh", *step.key)
        found = waits()
        return Judgement(
            afresh=afresh,
            verdicts=verdicts,
            imposed_s=found.imposed_s,
            clocks=found.clocks,
            failures=failures + found.failures,
        )

    def _begin_waits(
        self, step: StoredStep, matched: MatchedStep, aligned: AlignedStep | None
    ) -> Callable[[], "_StepWaits"]:
        """Begin to add up the waits of a step; return what waits for the result."""
        if aligned is None:
            return lambda: _waits_of(step, matched, aligned)
        try:
            aligned.step.find_all()
        except Exception:  # who reads the step reports it
            return lambda: _waits_of(step, matched, aligned)
        return self._threads.begin(len(step.view.records), lambda: _waits_of(step, matched, aligned))

    def _align(self, layout: JobLayout, step: MatchedStep) -> AlignedStep | None:
        """Return a step on aligned clocks; another attempt or layout begins with a fresh aligner."""
        attempt = step.view.attempt
        if self._aligner is None or self._aligner[:2] != (attempt, layout):
            self._aligner = (attempt, layout, ClockAligner(layout))
        return self._aligner[2].align(step) if len(step.view.records) else None

    def judge_liveness(self, report: LivenessReport) -> Judgement:
        """Judge which ranks make no progress."""
        detector, afresh = self._prepare(report.layout)
        try:
            return Judgement(afresh=afresh, verdicts=detector.observe_liveness(report.now_ns, report.ranks))
        except Exception:
            LOG.exception("detector failed to judge liveness")
            return Judgement(afresh=afresh, verdicts=[], failures=1)

    def _prepare(self, layout: JobLayout) -> tuple[StepJudge, bool]:
        """Return the detector for `layout`, and whether it replaces one that has judged."""
        if self._detector is not None and layout == self._layout:
            return self._detector, False
        replaces = self._layout is not None
        self._detector, self._layout = self._factory(layout), layout
        return self._detector, replaces


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _StepWaits:
    """Clocks at a step, and who made others wait in it."""

    clocks: ClockReading | None
    imposed_s: Mapping[tuple[int, str], float]
    failures: int = 0


def _waits_of(step: StoredStep, matched: MatchedStep, aligned: AlignedStep | None) -> _StepWaits:
    imposed: Mapping[tuple[int, str], float] = {}
    clocks, failures = None, 0
    try:
        if aligned is not None and needs_reading(step.view):
            clocks = reading_of(step.view, aligned.clocks)
        imposed = _imposed_s(step, matched, aligned, clocks) if len(step.view.records) else {}
    except Exception:  # verdicts matter more
        failures = 1
        LOG.exception("waits of attempt %d step %d are not known", *step.key)
    return _StepWaits(clocks=clocks, imposed_s=imposed, failures=failures)


def _imposed_s(
    step: StoredStep, matched: MatchedStep, aligned: AlignedStep | None, clocks: ClockReading | None
) -> Mapping[tuple[int, str], float]:
    """Return seconds that each rank made others wait, on the clocks that the store has from this step on."""
    if clocks is None or aligned is None:
        return imposed_s(step, matched)
    if clocks.offset_ns is not None and clocks.tied.all() and not aligned.clocks.devices.offset_ns.any():
        return waits.imposed_s(aligned.step)  # its clocks and those of the store differ by a constant
    return imposed_s(dataclasses.replace(step, offsets_ns=clocks.real_offsets_ns(step.offsets_ns)), matched)
