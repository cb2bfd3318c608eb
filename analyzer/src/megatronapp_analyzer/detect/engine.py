"""The detector: takes finished steps, returns verdicts."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from megatronapp_analyzer.align.clocks import AlignedStep, ClockAligner, ClockModel
from megatronapp_analyzer.detect import candidates as cand
from megatronapp_analyzer.detect.baseline import ColumnHistory, median_of_known
from megatronapp_analyzer.detect.candidates import CauseEvidence, SubjectResolver, SuspectCandidate
from megatronapp_analyzer.detect.causes.collective_transfers import (
    TENSOR_KINDS,
    TRANSFER_KINDS,
    CollectiveTransfers,
    transfers_of,
)
from megatronapp_analyzer.detect.causes.compute_cause import UNKNOWN, compute_cause, typical_parts
from megatronapp_analyzer.detect.causes.layer_parts import LAYER_KINDS, LayerParts
from megatronapp_analyzer.detect.effect import OffCpuParts, Remedy, off_cpu_times, seconds_lost
from megatronapp_analyzer.detect.evidence import ChannelSet, StepEvidence
from megatronapp_analyzer.detect.features import Floats, Ints, StepFeatures, extract_matched
from megatronapp_analyzer.detect.findings.lifecycle import FindingTrack, FindingTracker
from megatronapp_analyzer.detect.findings.neighbours import RISING_VOTES, Neighbours
from megatronapp_analyzer.detect.findings.report import evidence_text, verdict_of
from megatronapp_analyzer.detect.hang_tracker import HangTracker
from megatronapp_analyzer.detect.localize import MemberLocalizer
from megatronapp_analyzer.detect.reasons.host_spans import host_spans_s
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.units import Units
from megatronapp_analyzer.detect.work import WorkModel
from megatronapp_analyzer.errors import GraphError
from megatronapp_analyzer.graph.build import CLOCK_TOLERANCE_S, build_matched
from megatronapp_analyzer.graph.deciding_part import deciding_part, replica_of_rank
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.part_threads import ALONE, PartThreads
from megatronapp_analyzer.graph.replay import Replayer, replay
from megatronapp_analyzer.graph.waits import attribute
from megatronapp_analyzer.model import (
    LINK_CAUSES,
    Cause,
    JobLayout,
    JobMoment,
    RankLiveness,
    StepRecords,
    SubjectType,
    Verdict,
)
from megatronapp_common.trace import FIRST_COLLECTIVE_MASK, RecordKind

UNJUDGED_KINDS = (RecordKind.CAPTURE, RecordKind.PERTURB)
"""Spans of steps that are no measure: hooks make ranks slow in them, some more than others."""

MOST_UNLIKE = 100
"""Steps in a row with details, or without, that are not judged after those of the other sort; a longer window is
judged by references from it alone."""


class Detector:
    """Detector for a job of one layout. Not thread-safe; layout and settings bound its memory, however long the run."""

    def __init__(
        self,
        layout: JobLayout,
        settings: DetectorSettings | None = None,
        *,
        replayer: Replayer = replay,
        threads: PartThreads = ALONE,
    ) -> None:
        """Create a detector that knows nothing yet. `threads`: those that judge a large step."""
        self._threads = threads
        self._layout = layout
        self._replayer = replayer
        self._settings = settings or DetectorSettings()
        self._units = Units.of(layout)
        self._places = SubjectResolver(layout=layout, units=self._units)
        self._near = Neighbours(self._places, self._settings.group_share)
        self._replica_of_rank = replica_of_rank(layout)
        self._attempt: int | None = None
        self._hangs = HangTracker(layout, self._settings)
        self._tracks = FindingTracker(self._settings)
        self._reset()

    def observe(self, view: StepRecords, aligned: AlignedStep | None = None) -> list[Verdict]:
        """Judge one finished step; return the verdicts that are new or changed.

        Steps are given in order; one of a lower attempt than the newest is ignored, a higher attempt starts afresh. A
        step may lack ranks or records. A captured or perturbed step is not judged, and one with details only next to
        others with details. `aligned`: the same step, if the caller has aligned the clocks of all steps of the attempt.
        """
        if self._attempt is not None and view.attempt < self._attempt:
            return []
        ended = self._begin(view) if view.attempt != self._attempt else []
        if not len(view.records):
            return ended
        aligned = aligned or self._aligner.align(MatchedStep(view))
        kinds = aligned.step.record_columns.count
        if kinds[list(UNJUDGED_KINDS)].any():
            return ended
        if self._steps_seen > self._settings.warmup_steps:
            self._layers.read(aligned.step.view_of_kinds(LAYER_KINDS), self._channels.healthy_ranks)
        has_collectives = _has_all_collectives(aligned.step)
        if has_collectives:
            self._narrowing.read_details(aligned.step)
        # Recording details costs ranks time: such steps are not compared with plain ones.
        if not self._is_alike(has_collectives or bool(kinds[list(LAYER_KINDS)].any())):
            return ended
        tolerance_s = _tolerance_s(aligned)
        features = extract_matched(aligned.step, self._layout, self._work, self._threads, tolerance_s=tolerance_s)
        features = _without_doubtful_links(features, aligned.clocks)
        transfers = transfers_of(aligned.step.view_of_kinds(TRANSFER_KINDS), self._units.of_rank)
        self._steps_seen += 1
        self._recent.append(view.step)
        if self._steps_seen <= self._settings.warmup_steps or not np.isfinite(features.step_s).any():
            return ended
        return ended + self._judge(aligned, features, transfers)

    def observe_liveness(self, now_ns: int, ranks: Sequence[RankLiveness]) -> list[Verdict]:
        """Judge which ranks make no progress; return the verdicts that are new or changed.

        `now_ns` is the caller's real time. Ranks of a newer attempt than that of the steps are starting: the length of
        its steps is not known yet.
        """
        attempt = max((rank.attempt for rank in ranks if rank.attempt is not None), default=self._attempt or 0)
        starting = attempt != self._attempt
        usual = float("nan") if starting else float(self._microbatch_s.median()[0]) * self._microbatches
        step = 0 if starting or not self._recent else self._recent[-1]
        when = JobMoment(attempt=attempt, step=step, time=now_ns * 1e-9)
        return self._hangs.observe(ranks, usual if np.isfinite(usual) else None, when)

    def _reset(self) -> None:
        self._channels = ChannelSet(self._layout, self._units, self._settings)
        self._aligner = ClockAligner(self._layout)
        self._layers = LayerParts(self._layout, self._settings)
        self._work = WorkModel(self._layout, self._settings)
        self._narrowing = MemberLocalizer(self._units)
        self._microbatch_s = ColumnHistory(1, self._settings.window)
        self._microbatches = 1
        """Microbatches of the newest step."""
        self._steps_seen = 0
        self._detailed: bool | None = None
        """True if the steps that are judged have details; None before the first."""
        self._unlike = 0
        """Steps in a row that were not judged because they are of the other sort."""
        self._recent: collections.deque[int] = collections.deque(maxlen=self._settings.votes)

    def _is_alike(self, detailed: bool) -> bool:
        """Return whether a step is like those that are judged; after many of another sort, learn from them alone."""
        if self._detailed is None or detailed == self._detailed:
            self._detailed, self._unlike = detailed, 0
            return True
        self._unlike += 1
        if self._unlike <= MOST_UNLIKE:
            return False
        self._detailed, self._unlike = detailed, 0
        self._channels = ChannelSet(self._layout, self._units, self._settings)
        return True

    def _begin(self, view: StepRecords) -> list[Verdict]:
        """Begin another attempt without anything learned: its processes, and perhaps its nodes, are other ones."""
        now = _when(view)
        ended = [self._verdict(track) for track in self._tracks.close(now)]
        self._attempt = view.attempt
        self._reset()
        return ended

    def _judge(self, aligned: AlignedStep, features: StepFeatures, transfers: CollectiveTransfers) -> list[Verdict]:
        view = aligned.step.view
        step_s = median_of_known(features.step_s)
        self._microbatches = max(int(features.forwards.max(initial=0)), 1)  # more as the batch grows
        usual = float(self._microbatch_s.median()[0]) * self._microbatches
        budget = min(usual, step_s) if np.isfinite(usual) else step_s
        evidence = self._channels.read(features, transfers, budget, whole=view.lost == 0)
        if not any((part.over).any() for part in (evidence.compute, evidence.host, evidence.data, evidence.link)):
            self._microbatch_s.add(np.array([step_s / self._microbatches]), np.array([True]))
        found = self._candidates(evidence, aligned.step, features, budget)
        self._tracks.propose(
            found,
            lambda votes: self._since(view, votes),
            lambda suspect: self._near.may_be_slow_too(suspect, evidence.part(suspect)),
            hits=lambda suspect: self._hits(suspect, evidence),
        )
        told = self._tracks.advance(_when(view), lambda track: self._over(track, evidence))
        self._note_host_spans(aligned.step, features)
        doubt_s = _doubt_s(aligned)
        self._cost(aligned, evidence)
        told += self._tracks.confirm(
            _when(view),
            lambda track: self._costly(track, budget, doubt_s),
            lambda track: cause_of(track, self._places),
        )
        return [self._verdict(track) for track in told]

    def _costly(self, track: FindingTrack, step_s: float, doubt_s: float) -> bool:
        """Return true if the replayed cost of a suspect is above its own uncertainty.

        A delay may be large and cost nothing: without it the step is as long where another rank is waited for.
        """
        least_s = self._settings.cost_share * step_s
        if track.candidate.cause in LINK_CAUSES:
            least_s += doubt_s
        return track.least_cost_s > 0 and track.seconds_per_step >= least_s

    def _candidates(
        self, evidence: StepEvidence, step: MatchedStep, features: StepFeatures, step_s: float
    ) -> list[SuspectCandidate]:
        """Return the subjects that the last steps are evidence against."""
        host, data = (
            cand.of_host(part, self._active(part), self._places, self._settings)
            for part in (evidence.host, evidence.data)
        )
        on_device = evidence.on_device
        link = cand.of_links(
            evidence.link, self._active(evidence.link), evidence.pairs, self._places, on_device=on_device
        )
        compute = cand.of_compute(evidence.compute, self._active(evidence.compute), self._places, self._settings)
        groups = cand.of_groups(evidence.collective, self._active(evidence.collective), evidence.groups, self._places)
        link += [group for group in groups if not has_other_reason(group, evidence, self._units)]
        others = host + data + link
        compute = cand.without_explained(compute, others, self._places)
        self._narrowing.begin_step()
        compute = [self._narrowing.narrow(step, each, evidence.growth, self._places) for each in compute]
        others += cand.of_replicas(evidence.work, self._active(evidence.work), features.work, self._places)
        found = self._worth_telling(compute + others, step_s, on_device=on_device)
        found += cand.of_job(evidence.regression, self._active(evidence.regression), self._places)
        alone = cand.of_imbalance(evidence.imbalance, self._active(evidence.imbalance), self._places)
        return found + [candidate for candidate in alone if not self._spoken_for(candidate, found)]

    def _worth_telling(
        self, candidates: list[SuspectCandidate], step_s: float, *, on_device: bool
    ) -> list[SuspectCandidate]:
        noise = self._settings.device if on_device else self._settings.processor
        found = [candidate for candidate in candidates if candidate.excess_s >= noise.impact * step_s]
        strongest_s = max([self._tracks.strongest_s(), *(candidate.excess_s for candidate in found)])
        return [
            candidate
            for candidate in found
            if candidate.excess_s >= (LINK_WEAKER if candidate.cause in LINK_CAUSES else noise.weaker) * strongest_s
        ]

    def _hits(self, candidate: SuspectCandidate, evidence: StepEvidence) -> int:
        """Return the number of steps a candidate needs."""
        return (self._settings.device if evidence.on_device else self._settings.processor).hits

    def _spoken_for(self, imbalance: SuspectCandidate, found: list[SuspectCandidate]) -> bool:
        named = [track.candidate for track in self._tracks.live.values() if track.named]
        return any(
            set(candidate.subject.ranks) & set(imbalance.subject.ranks)
            for candidate in found + named
            if candidate.key != imbalance.key
        )

    def _active(self, evidence: CauseEvidence) -> Ints:
        return np.flatnonzero(evidence.votes >= self._settings.suspect_votes - evidence.harmful)

    def _over(self, track: FindingTrack, evidence: StepEvidence) -> tuple[bool, int]:
        """Return whether most of a track's columns are over in this step, and its votes."""
        part = evidence.part(track.candidate)
        where = list(track.candidate.columns)
        hit = bool(part.over[where].mean() >= 0.5)
        if hit and self._is_member(track):
            hit = track.is_of_member(float(part.ratio[where].max()))
        if hit:
            track.ratios.append(float(np.median(part.ratio[where])))
            track.occurrences.append(float(part.occurrence_s[where].max()))
            if track.candidate.cause is Cause.COMPUTE:
                ranks = track.candidate.subject.ranks
                growth = evidence.growth.of(ranks, track.candidate.columns)
                track.parts.append(dataclasses.replace(growth, layers=self._layers.excess(ranks, track.since.step)))
            if track.candidate.cause is Cause.HOST:
                parts = evidence.host_parts
                track.gaps.append(float(parts.gaps_s[where].max()))
                off_cpu = OffCpuParts(
                    stopped=float(parts.stopped_part[where].max()), queued=float(parts.queued_part[where].max())
                )
                track.off_cpu.append((float(parts.off_cpu_s[where].max()), off_cpu))
                track.late.append(float(evidence.launches.late.ratio[where].max()))
            track.follow_growth()
        return hit, int(part.votes[where].min())

    def _note_host_spans(self, step: MatchedStep, features: StepFeatures) -> None:
        """Note what the hosts of findings did meanwhile. It decides no verdict, only its reason."""
        found = self._tracks.with_evidence(step.view.step)
        tracks = [track for track in found if track.candidate.cause is Cause.HOST]
        if not tracks:
            return
        collecting_s, stopped_s = (
            host_spans_s(step, kind, features.forwards) for kind in (RecordKind.GC, RecordKind.STOPPED)
        )
        for track in tracks:
            ranks = list(track.candidate.subject.ranks)
            track.host_spans.append((float(collecting_s[ranks].max()), float(stopped_s[ranks].max())))

    def _is_member(self, track: FindingTrack) -> bool:
        """Return whether slow compute is that of a rank whose unit has others."""
        candidate = track.candidate
        is_rank = candidate.cause is Cause.COMPUTE and len(candidate.subject.ranks) == len(candidate.columns) == 1
        return is_rank and len(self._units.ranks(candidate.columns[0])) > 1

    def _cost(self, aligned: AlignedStep, evidence: StepEvidence) -> None:
        """Replay the step without each finding and add its cost; a step that cannot be replayed adds none."""
        step = aligned.step
        hit = self._tracks.with_evidence(step.view.step)
        if not hit:
            return
        step = deciding_part(step, self._replica_of_rank, [track.candidate.subject.ranks for track in hit])
        try:
            graph = build_matched(step, tolerance_s=_tolerance_s(aligned), unit_of_rank=self._units.of_rank)
        except GraphError:  # a suspect stays one until later steps show its cost
            return
        remedies = [
            Remedy(
                subject=live_track.candidate.subject,
                cause=live_track.candidate.cause,
                ratio=live_track.ratio,
                excess_s=live_track.gap_s,
                off_cpu_parts=live_track.off_cpu_parts,
                pairs=_pairs(live_track.candidate, evidence),
                late=evidence.launches.lengthened(live_track.candidate.subject.ranks) if live_track.late else (),
            )
            for live_track in hit
        ]
        waits = attribute(graph)
        lost_s = seconds_lost(graph, remedies, self._replayer, off_cpu=off_cpu_times(graph, step.view))
        if graph.unmatched > HOLES_PART * (len(graph.messages) + len(graph.collectives)):
            # Where many waits lack their partner's record, a replay cannot shorten them: take the excess itself.
            lost_s = np.maximum(lost_s, [track.candidate.excess_s for track in hit])
        for track, lost in zip(hit, lost_s, strict=True):
            track.add_cost(float(lost))
            track.text = evidence_text(track, waits)

    def _since(self, view: StepRecords, votes: int) -> JobMoment:
        first = list(self._recent)[-min(votes, len(self._recent))]
        return JobMoment(attempt=view.attempt, step=first, time=view.real_time_s)

    def _verdict(self, track: FindingTrack) -> Verdict:
        return verdict_of(track, self._layout, self._channels.columns)


def _doubt_s(aligned: AlignedStep) -> float:
    """Return by how much the aligned times of a rank may be wrong."""
    return aligned.clocks.worst_ns() * 1e-9


def _tolerance_s(aligned: AlignedStep) -> float:
    """Return by how much the aligned clocks of two ranks may differ."""
    return CLOCK_TOLERANCE_S + _doubt_s(aligned)


def has_other_reason(group: SuspectCandidate, evidence: StepEvidence, units: Units) -> bool:
    """Return true if a member is about to be a suspect: what slows its device or host slows its transfers, too."""
    ranks = list(group.subject.ranks)
    slow = evidence.compute.votes[units.of_rank[ranks]]
    return bool((np.maximum(slow, evidence.host.votes[ranks]) >= RISING_VOTES).any())


def cause_of(track: FindingTrack, places: SubjectResolver) -> Cause:
    """Return the cause of a finding by all its evidence: what passes contain shows why they are longer."""
    candidate = track.candidate
    if candidate.cause is not Cause.COMPUTE:
        return candidate.cause
    parts = typical_parts(track.parts)
    if len(candidate.subject.ranks) == 1 or candidate.subject.type is not SubjectType.RANK:
        parts = dataclasses.replace(parts, transfers=UNKNOWN)  # the slow member is known
    return compute_cause(track.ratio, parts, link=places.link_cause(candidate.subject.ranks, on_device=True))


def _pairs(candidate: SuspectCandidate, evidence: StepEvidence) -> tuple[tuple[int, int], ...]:
    """Return source and destination of the links that a candidate is about."""
    if candidate.cause not in LINK_CAUSES or candidate.subject.type is SubjectType.GROUP:
        return ()
    return tuple((int(a), int(b)) for a, b in evidence.pairs[list(candidate.columns)])


def _when(view: StepRecords) -> JobMoment:
    return JobMoment(attempt=view.attempt, step=view.step, time=view.real_time_s)


def _has_all_collectives(step: MatchedStep) -> bool:
    """Return whether a rank has recorded more than the first collective of a pass, as plain steps have it.

    Ranks that record all run these passes without CUDA graphs, and are slower.
    """
    return bool((step.of_kinds(TENSOR_KINDS)["ordinal"] & FIRST_COLLECTIVE_MASK).any())


def _without_doubtful_links(features: StepFeatures, clocks: ClockModel) -> StepFeatures:
    """Mark deliveries as unknown between clocks that are not aligned well enough."""
    doubt = clocks.pairs_uncertainty_ns(features.pairs) * 1e-9
    usual = median_of_known(features.passes_s) if np.isfinite(features.passes_s).any() else 0.0
    delivery: Floats = np.where(doubt > DOUBTFUL_SHARE * usual, np.nan, features.delivery_s)
    return features.with_delivery(delivery)


LINK_WEAKER = 0.35
"""Part of the strongest subject's excess that the delays of a link must reach to be named, too."""
HOLES_PART = 0.1
"""Part of the messages and collectives that lack a record from which on a replay says too little."""
DOUBTFUL_SHARE = 0.25
"""Clock uncertainty, as part of a microbatch's compute time, beyond which deliveries are not judged."""
