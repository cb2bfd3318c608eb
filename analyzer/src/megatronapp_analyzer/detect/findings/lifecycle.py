"""Life of a finding: suspect (inside the hub only), confirmed, recovering, cleared."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from megatronapp_analyzer.detect.candidates import SuspectCandidate
from megatronapp_analyzer.detect.causes.compute_cause import PassParts
from megatronapp_analyzer.detect.effect import NO_PARTS, OffCpuParts
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.model import LINK_CAUSES, Cause, JobMoment, SubjectType, VerdictState, VerdictSubject

Key = tuple[str, tuple[int, ...], str]
MAX_EVIDENCE = 16
SETTLED_HITS = 8
"""Steps of evidence after which the cause of a finding is judged again: the first ones may have coincided with others.

Another process that uses a device for a part of the time may be at work in three optimizers in a row.
"""
GROWN_STEPS = 4
"""Newest steps in all of which a fault must be larger than before to have grown."""
GROWN_RATIO = 2.0
"""How many times larger it is then."""
SHRUNK_PART = 0.25
"""Part of the slowdown of a member of a group below which that of the group need not be the member's any more."""


@dataclasses.dataclass(slots=True, kw_only=True)
class FindingTrack:
    """One finding over its life."""

    candidate: SuspectCandidate
    since: JobMoment
    state: VerdictState = VerdictState.SUSPECT
    until: JobMoment | None = None
    held: int = 0
    """Steps for which confirmation was deferred."""
    certain: bool = False
    """True if this step's votes suffice to confirm it."""
    clean: int = 0
    pause: int = 0
    """Longest number of clean steps after which it was back."""
    gap: int = 0
    """The same of steps after which there was evidence, which may not have lasted."""
    steps_seen: int = 0
    steps_paused: int = 0
    """Steps without evidence while it was recovering."""
    hits: int = 0
    evidence: collections.deque[int] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE))
    ratios: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE))
    occurrences: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE)
    )
    gaps: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE))
    """For a host, the part of `occurrences` that lies between spans."""
    off_cpu: collections.deque[tuple[float, OffCpuParts]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE)
    )
    """For a host, the part of `occurrences` in which it did not run, and that as parts of all such time."""
    host_spans: collections.deque[tuple[float, float]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE)
    )
    """For a host, seconds of garbage collections and of stops, per occurrence."""
    late: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE))
    """For a host, how many times as long its device's spans were."""
    parts: collections.deque[PassParts] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE)
    )
    """For slow compute, how much parts of the work have grown."""
    confirmed_cause: Cause | None = None
    """Cause by all evidence, once it is confirmed; the candidate has that of its channel."""
    lost_s: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=MAX_EVIDENCE))
    replayed_s: float = 0.0
    """Sum of all costs, of which `lost_s` has the newest."""
    replays: int = 0
    text: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        ranks = "-".join(str(rank) for rank in self.subject.ranks[:4])
        return f"a{self.since.attempt}-s{self.since.step}-{self.subject.type}-{ranks}-{self.cause}"

    @property
    def cause(self) -> Cause:
        """Cause by all evidence; before it is confirmed, by its channel."""
        return self.confirmed_cause or self.candidate.cause

    @property
    def subject(self) -> VerdictSubject:
        """Subject; of members of a unit between which links are slow, the group that they are."""
        subject = self.candidate.subject
        between = self.cause in LINK_CAUSES and self.candidate.cause is Cause.COMPUTE
        return dataclasses.replace(subject, type=SubjectType.GROUP) if between else subject

    @property
    def ratio(self) -> float:
        """Typical slowdown over the evidence."""
        return float(np.median(self.ratios)) if self.ratios else self.candidate.ratio

    @property
    def occurrence_s(self) -> float:
        """Typical excess per microbatch or message over the evidence."""
        return float(np.median(self.occurrences)) if self.occurrences else self.candidate.occurrence_s

    @property
    def gap_s(self) -> float:
        """For a host, the part of `occurrence_s` that lies between spans; for other causes all of it."""
        return float(np.median(self.gaps)) if self.gaps else self.occurrence_s

    @property
    def off_cpu_s(self) -> float:
        """For a host, the part of `occurrence_s` in which it was stopped, collected or waited for a processor."""
        return float(np.median([seconds for seconds, _ in self.off_cpu])) if self.off_cpu else 0.0

    @property
    def off_cpu_parts(self) -> OffCpuParts:
        """The same as parts of all time in which the process did not run."""
        if not self.off_cpu:
            return NO_PARTS
        parts = [part for _, part in self.off_cpu]
        return OffCpuParts(
            stopped=float(np.median([part.stopped for part in parts])),
            queued=float(np.median([part.queued for part in parts])),
        )

    @property
    def host_spans_s(self) -> tuple[float, float]:
        """Mean time of garbage collections, and of stops, over the evidence."""
        if not self.host_spans:
            return 0.0, 0.0
        collecting_s, stopped_s = np.mean(self.host_spans, axis=0).tolist()
        return collecting_s, stopped_s

    @property
    def late_ratio(self) -> float:
        """Typical growth of a device's spans for late launches over the evidence; 1 for none."""
        return float(np.median(self.late)) if self.late else 1.0

    @property
    def launches_late(self) -> bool:
        """True if late launches are most of a host's fault."""
        return self.gap_s + self.off_cpu_s < self.occurrence_s / 2

    @property
    def not_running(self) -> bool:
        """True if most of a host's fault is that its process does not run."""
        return self.off_cpu_s > self.occurrence_s / 2

    @property
    def seconds_per_step(self) -> float:
        """Mean cost over the evidence."""
        return float(np.mean(self.lost_s)) if self.lost_s else 0.0

    @property
    def seconds_lost(self) -> float:
        """Sum of the costs of all steps that were evidence; the mean for those that were not replayed."""
        return self.replayed_s + max(self.hits - self.replays, 0) * self.seconds_per_step

    @property
    def least_cost_s(self) -> float:
        """Lower bound of the mean cost per step: two standard errors below it; unbounded below two replays."""
        count = len(self.lost_s)
        if count < 2:
            return -math.inf
        return self.seconds_per_step - 2.0 * float(np.std(self.lost_s, ddof=1)) / math.sqrt(count)

    def is_of_member(self, ratio: float) -> bool:
        """Return whether a slowdown of its group may still be that of the named member, and not what is left after it.

        Devices that a fault has heated may all stay a little slower.
        """
        if not self.named or len(self.ratios) < GROWN_STEPS:
            return True
        return ratio - 1.0 >= SHRUNK_PART * (self.ratio - 1.0)

    def follow_growth(self) -> None:
        """Forget what was measured before the fault grew, such as before another one of the same subject and cause."""
        sizes = list(self.occurrences)
        earlier, newest = sizes[:-GROWN_STEPS], sizes[-GROWN_STEPS:]
        if len(earlier) < GROWN_STEPS or min(newest) <= GROWN_RATIO * float(np.median(earlier)):
            return
        for measured in (self.ratios, self.occurrences, self.gaps, self.off_cpu, self.late, self.parts):
            _keep_newest(measured, GROWN_STEPS)
        _keep_newest(self.lost_s, GROWN_STEPS - 1)  # those of the newest step follow
        _keep_newest(self.host_spans, GROWN_STEPS - 1)

    def add_cost(self, seconds: float) -> None:
        """Add the cost of one step."""
        self.lost_s.append(seconds)
        self.replayed_s += seconds
        self.replays += 1

    @property
    def named(self) -> bool:
        """True once the finding has been reported as a verdict."""
        return self.state is not VerdictState.SUSPECT


class FindingTracker:
    """Tracker of all live findings."""

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self.live: dict[Key, FindingTrack] = {}
        self._narrowed: list[FindingTrack] = []
        """Named findings, as they were before their subject became narrower in this step."""
        self._step = 0
        self._ended: dict[Key, int] = {}
        """Step with the last evidence of each finding that was cleared not long ago."""

    def propose(
        self,
        candidates: Iterable[SuspectCandidate],
        when: Callable[[int], JobMoment],
        hold: Callable[[SuspectCandidate], bool],
        *,
        hits: Callable[[SuspectCandidate], int],
    ) -> None:
        """Take this step's candidates: new suspects, and suspects with enough votes to be confirmed.

        `when(votes)` is the moment at which the last `votes` votes began; `hold` is true while more evidence is
        awaited; `hits(candidate)` steps, this one included, must be evidence against a subject that is named.
        """
        for known in self.live.values():
            known.certain = False
        for candidate in candidates:
            self._narrow(candidate)
            if self._covered(candidate):
                continue
            track = self.live.get(candidate.key)
            if track is None:
                track = self.live[candidate.key] = FindingTrack(
                    candidate=candidate,
                    since=when(candidate.votes),
                    hits=candidate.votes - 1,
                    steps_seen=candidate.votes - 1,
                    pause=self._pause_before(candidate),
                )
            track.candidate = candidate
            votes = self._settings.confirm_votes - candidate.harmful
            certain = candidate.votes >= votes and track.hits + 1 >= hits(candidate)
            if track.state is VerdictState.SUSPECT and certain:
                if hold(candidate) and track.held < self._settings.votes:
                    track.held += 1
                    continue
                track.certain = True

    def advance(self, now: JobMoment, over: Callable[[FindingTrack], tuple[bool, int]]) -> list[FindingTrack]:
        """Age every track by one step; return those whose verdict changed. `over` returns (over now, votes)."""
        told = [dataclasses.replace(track, state=VerdictState.CLEARED, until=now) for track in self._narrowed]
        self._narrowed.clear()
        self._step += 1
        back: list[FindingTrack] = []
        for key, track in list(self.live.items()):
            before = track.state
            hit, votes = over(track)
            track.steps_seen += 1
            self._age(track, hit, votes, now)
            track.steps_paused += track.state is VerdictState.RECOVERING and not hit
            least = self._settings.suspect_votes - track.candidate.harmful
            if track.state is VerdictState.SUSPECT and votes < least:
                del self.live[key]
            elif track.state is VerdictState.CLEARED:
                del self.live[key]
                self._ended[key] = self._step - track.clean
                told.append(track)
            elif track.named and (hit or track.state is not before):
                told.append(track)
                if before is VerdictState.RECOVERING and track.state is VerdictState.CONFIRMED:
                    back.append(track)
        return told + [ended for track in back for ended in self._end_parts(track, now)]

    def confirm(
        self, now: JobMoment, costly: Callable[[FindingTrack], bool], cause: Callable[[FindingTrack], Cause]
    ) -> list[FindingTrack]:
        """Confirm suspects with enough votes, this step included, whose replayed cost is `costly`, with their `cause`.

        Returns them, and the findings that end because one of these includes them, as a node does its ranks; and
        findings with the cause that they had before further evidence, which end, and continue with another cause.
        """
        revised = [
            track
            for track in self.live.values()
            if track.named and track.hits == SETTLED_HITS and not track.clean and cause(track) is not track.cause
        ]
        before = [dataclasses.replace(track, state=VerdictState.CLEARED, until=now) for track in revised]
        for track in revised:
            track.confirmed_cause = cause(track)
        confirmed = [
            track
            for track in self.live.values()
            if track.state is VerdictState.SUSPECT and track.certain and not track.clean and costly(track)
        ]
        for track in confirmed:
            track.state, track.confirmed_cause = VerdictState.CONFIRMED, cause(track)
        ended = [part for track in confirmed for part in self._end_parts(track, now)]
        return before + confirmed + ended

    def _pause_before(self, candidate: SuspectCandidate) -> int:
        """Return for how many steps a fault has paused whose verdict was cleared not long ago; 0 for others."""
        newest = self._step + 1 - candidate.votes
        limit = self._settings.longest_pause
        self._ended = {key: last for key, last in self._ended.items() if newest - last <= limit}
        return max(newest - self._ended.get(candidate.key, newest), 0)

    def _end_parts(self, whole: FindingTrack, now: JobMoment) -> list[FindingTrack]:
        """End findings of the same cause whose columns are some of those of `whole`; return those that were named."""
        columns = set(whole.candidate.columns)
        parts = {
            key: track
            for key, track in self.live.items()
            if _have_the_same_columns(track.candidate, whole.candidate) and set(track.candidate.columns) < columns
        }
        for key, track in parts.items():
            track.until = now
            del self.live[key]
        ended = [track for track in parts.values() if track.named]
        for track in ended:
            track.state = VerdictState.CLEARED
        return ended

    def close(self, now: JobMoment) -> list[FindingTrack]:
        """End all because the job begins another attempt; return those that had been named."""
        ended = [track for track in self.live.values() if track.named]
        for track in ended:
            track.state, track.until = VerdictState.CLEARED, now
        self.live.clear()
        self._ended.clear()
        return ended

    def with_evidence(self, step: int) -> list[FindingTrack]:
        """Return the findings for which a step is evidence."""
        return [track for track in self.live.values() if track.evidence and track.evidence[-1] == step]

    def strongest_s(self) -> float:
        """Return the current cost of the costliest named finding, in seconds per step."""
        return max(
            (track.candidate.excess_s for track in self.live.values() if track.state is VerdictState.CONFIRMED),
            default=0.0,
        )

    def _age(self, track: FindingTrack, hit: bool, votes: int, now: JobMoment) -> None:
        if hit:
            track.hits += 1
            track.gap, track.clean = max(track.gap, track.clean), 0
            track.evidence.append(now.step)
            # Single steps after the end of a fault are noise: its verdict must not stay longer after each of them.
            if votes >= self._settings.confirm_votes - track.candidate.harmful:
                track.pause, track.gap = max(track.pause, track.gap), 0
            if track.state is VerdictState.RECOVERING and votes >= self._settings.confirm_votes:
                track.state = VerdictState.CONFIRMED
            return
        track.clean += 1
        # Votes of a column that has become unknown stay as they are; its verdict must not stay for that.
        unknown = track.clean >= self._settings.clear_steps
        if track.state is VerdictState.CONFIRMED and (votes < self._settings.suspect_votes or unknown):
            track.state = VerdictState.RECOVERING
        elif track.state is VerdictState.RECOVERING and track.clean >= self._clean_steps(track):
            track.state, track.until = VerdictState.CLEARED, now

    def _clean_steps(self, track: FindingTrack) -> int:
        """Return after how many clean steps a verdict is cleared: a fault that has paused may pause again."""
        return max(self._settings.clear_steps, min(2 * track.pause, self._settings.longest_pause))

    def _narrow(self, candidate: SuspectCandidate) -> None:
        """Continue a finding about several ranks, such as a tensor-parallel unit, as that about the one at fault."""
        for key, track in list(self.live.items()):
            known = track.candidate
            if (
                _have_the_same_columns(known, candidate)
                and known.columns == candidate.columns
                and set(candidate.subject.ranks) < set(known.subject.ranks)
                and track.cause not in LINK_CAUSES
                and not self._is_named(candidate.key)
            ):
                if track.named:
                    self._narrowed.append(dataclasses.replace(track))
                suspect = self.live.get(candidate.key)
                if suspect is not None and suspect.since.step < track.since.step:
                    track.since = suspect.since
                self.live[candidate.key] = self.live.pop(key)

    def _is_named(self, key: Key) -> bool:
        return key in self.live and self.live[key].named

    def _covered(self, candidate: SuspectCandidate) -> bool:
        """Return true if a named finding of the same cause has these columns; a larger subject replaces it."""
        columns = set(candidate.columns)
        for key, track in list(self.live.items()):
            if key == candidate.key or not _have_the_same_columns(track.candidate, candidate):
                continue
            if columns & set(track.candidate.columns):
                if len(columns) <= len(track.candidate.columns):
                    # What pauses is no reason for the slowness of a part of it.
                    return track.named and track.clean < self._settings.clear_steps
                if candidate.votes >= self._settings.confirm_votes and not track.named:
                    del self.live[key]
        return False


def _keep_newest(measured: collections.deque[Any], count: int) -> None:
    """Keep the newest values."""
    while len(measured) > count:
        measured.popleft()


def _have_the_same_columns(first: SuspectCandidate, second: SuspectCandidate) -> bool:
    """Return whether columns of the two are of one table: those of groups are others than those of pairs of ranks."""
    of_groups = [candidate.subject.type is SubjectType.GROUP for candidate in (first, second)]
    return first.cause is second.cause and of_groups[0] == of_groups[1]
