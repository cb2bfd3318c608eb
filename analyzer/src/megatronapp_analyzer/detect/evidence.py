"""All channels together: turn one step's features into evidence per cause, with the votes of the last steps."""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask, filled, median_of_known, median_of_others_by
from megatronapp_analyzer.detect.candidates import CauseEvidence, SuspectCandidate
from megatronapp_analyzer.detect.causes.collective_transfers import CollectiveTransfers
from megatronapp_analyzer.detect.causes.group_links import GroupLinks
from megatronapp_analyzer.detect.causes.growth import PartBaselines, PartGrowth
from megatronapp_analyzer.detect.causes.job_regression import UNKNOWN, JobBaseline
from megatronapp_analyzer.detect.causes.work_balance import WorkBalance
from megatronapp_analyzer.detect.compute_channel import LogChannel
from megatronapp_analyzer.detect.crowding import COMPUTE_PART, HELPER_PART, CrowdingBaseline
from megatronapp_analyzer.detect.evidence_channels import (
    COUPLED_CAP,
    SIGMA_CAP,
    ChannelReading,
    DelayChannel,
)
from megatronapp_analyzer.detect.features import Floats, Ints, StepFeatures
from megatronapp_analyzer.detect.kernel_launch_delays import LaunchBaseline, LaunchReading
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.statistics.onset_order import OnsetOrder
from megatronapp_analyzer.detect.statistics.persistence import VoteWindow
from megatronapp_analyzer.detect.units import Units
from megatronapp_analyzer.model import Cause, JobLayout, SubjectType

IDLE_WEIGHT = 2.0
"""Factor on the cost that idle time must reach to be named: a whole step has more disturbances than stalls have."""

HARMFUL_RATIO = 1.08
"""Slowdown of a device from which on fewer steps suffice: one of 10 % is seldom measured as less."""

CROWDED_STEPS = 28
"""Shortest time in which a crowded processor is evidence: other processes run for bursts of some steps."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostParts:
    """Parts of the evidence against each host, without late launches; 0 where they are not over."""

    gaps_s: Floats
    """Seconds between spans, per FORWARD."""
    off_cpu_s: Floats
    """Seconds in which the process was stopped or waited for a processor, per FORWARD."""
    stopped_part: Floats
    """The time in which it was stopped, as a part of all such time of the rank, 0 to 1."""
    queued_part: Floats
    """The same of the time in which it waited for a processor."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepEvidence:
    """Evidence of one step. Columns: units, ranks, directed pairs."""

    compute: CauseEvidence
    host: CauseEvidence
    data: CauseEvidence
    work: CauseEvidence
    """Evidence that replicas get more work, in a column for each."""
    link: CauseEvidence
    collective: CauseEvidence
    """Evidence against the links of groups, in a column for each of `groups`."""
    imbalance: CauseEvidence
    regression: CauseEvidence
    """Evidence against the whole job, in one column."""
    launches: LaunchReading
    host_parts: HostParts
    pairs: Ints
    groups: tuple[tuple[int, ...], ...]
    growth: PartGrowth
    on_device: bool

    def part(self, candidate: SuspectCandidate) -> CauseEvidence:
        """Return the evidence that a candidate's columns belong to."""
        if candidate.subject.type is SubjectType.GROUP:
            return self.collective
        parts = {
            Cause.COMPUTE: self.compute,
            Cause.HOST: self.host,
            Cause.DATA: self.data,
            Cause.DATA_IMBALANCE: self.work,
            Cause.LINK: self.link,
            Cause.NODE_LINK: self.link,
            Cause.REGRESSION: self.regression,
        }
        if candidate.cause in parts:
            return parts[candidate.cause]
        return self.compute if candidate.by_history else self.imbalance


class ChannelSet:
    """Channels and votes of one attempt."""

    def __init__(self, layout: JobLayout, units: Units, settings: DetectorSettings) -> None:
        self._settings = settings
        self._units = units
        self._stage_of = np.array(layout.stages, np.int64)
        self._nodes = layout.nodes
        stages = self._stage_of
        self._compute = LogChannel(
            units.stage, units.replica, settings, cap=SIGMA_CAP if len(units) == layout.world else COUPLED_CAP
        )
        self._chunks = layout.vpp
        self._loss_stages = layout.loss_stages
        self._stages_of_role = layout.pp
        self._launches = LaunchBaseline(layout, units, settings)
        self._stall = DelayChannel(stages, settings)
        self._idle = DelayChannel(stages, settings, weight=IDLE_WEIGHT)
        self._data = DelayChannel(_readers(layout), settings)
        self._stopped = DelayChannel(np.zeros(layout.world, np.int64), settings)
        self._crowded = DelayChannel(stages, settings, least_window=CROWDED_STEPS)
        self._crowding = CrowdingBaseline(layout.world, settings)
        self._pairs: dict[tuple[int, int], int] = {}
        self._table: Ints = np.empty((0, 2), np.int64)
        """The pairs, a row each."""
        self._newest: tuple[Ints, Ints] = (self._table, np.empty(0, np.int64))
        """Pairs of the newest step and their columns: those of the next step are the same but for lost records."""
        self._link = DelayChannel(np.empty(0, np.int64), settings)
        self._votes_compute = VoteWindow(len(units), settings.votes)
        self._onsets = {
            Cause.COMPUTE: OnsetOrder(len(units), settings.clear_steps),
            Cause.HOST: OnsetOrder(layout.world, settings.clear_steps),
            Cause.DATA: OnsetOrder(layout.world, settings.clear_steps),
        }
        self._votes_imbalance = VoteWindow(len(units), settings.imbalance_steps)
        self._votes_host = VoteWindow(layout.world, settings.votes)
        self._job = JobBaseline()
        self._votes_job = VoteWindow(1, settings.votes)
        self._votes_data = VoteWindow(layout.world, settings.votes)
        self._work = WorkBalance(layout, settings)
        self._votes_link = VoteWindow(0, settings.votes)
        self._groups = GroupLinks(layout, settings)
        self._parts = PartBaselines(layout, units, settings)

    @property
    def columns(self) -> int:
        """Columns of all causes."""
        return len(self._units) + 2 * len(self._stage_of) + len(self._pairs) + len(self._groups.groups)

    @property
    def healthy_ranks(self) -> Mask:
        """Ranks against whose compute no recent step is evidence."""
        mask: Mask = (self._votes_compute.count == 0)[self._units.of_rank]
        return mask

    @property
    def pairs(self) -> Ints:
        """Source and destination of each link column."""
        if len(self._table) < len(self._pairs):
            self._table = np.array(list(self._pairs), np.int64).reshape(-1, 2)
        return self._table

    def read(
        self, features: StepFeatures, transfers: CollectiveTransfers, step_s: float, *, whole: bool
    ) -> StepEvidence:
        """Judge one step. `step_s` is the usual length of a step; `whole` is true if no record was lost."""
        crowded_s = self._crowding.growth_s(features.queue_s)
        stalling = self._votes_host.count >= self._settings.suspect_votes
        launches = self._launches.read(features, step_s, stalling)
        compute = self._read_compute(features, step_s, crowded_s, launches)
        self._crowding.learn(features.queue_s, ~compute.over[self._units.of_rank])
        host, parts = self._read_host(features, step_s, crowded_s, launches, whole=whole)
        return StepEvidence(
            compute=compute,
            host=host,
            host_parts=parts,
            data=self._read_data(features, step_s, crowded_s, whole=whole),
            work=self._work.read(features, step_s),
            link=self._read_link(features, step_s, crowded_s),
            collective=self._groups.read(transfers, step_s),
            groups=self._groups.groups,
            growth=self._parts.read(features, transfers, compute.votes == 0),
            imbalance=self._read_imbalance(features),
            regression=self._read_regression(features),
            launches=launches,
            pairs=self.pairs,
            on_device=features.on_device,
        )

    def _read_compute(
        self, features: StepFeatures, step_s: float, crowded_s: Floats, launches: LaunchReading
    ) -> CauseEvidence:
        noise = self._settings.device if features.on_device else self._settings.processor
        doubt = COMPUTE_PART * self._units.slowest(crowded_s)
        values = np.where(launches.unknown, np.nan, self._units.slowest(features.compute_s))
        usual = ~launches.passes.over  # without a history of its own, this channel would learn the fault as usual
        reading = self._compute.read(values, noise, doubt, usual=usual).or_else(launches.passes)
        self._votes_compute.add(reading.over, reading.known)
        count = self._units.slowest(features.forwards / self._chunks)
        evidence = _evidence(Cause.COMPUTE, reading, self._votes_compute, count, self._harm_s(features, step_s))
        if features.on_device:
            # While others compute or wait, its passes are a part of the step: a tenth of them costs less than that.
            evidence = dataclasses.replace(evidence, harmful=evidence.harmful | (reading.ratio >= HARMFUL_RATIO))
        return self._with_onsets(evidence, reading.known, on_device=features.on_device)

    def _read_host(
        self, features: StepFeatures, step_s: float, crowded_s: Floats, launches: LaunchReading, *, whole: bool
    ) -> tuple[CauseEvidence, HostParts]:
        """Return the evidence against hosts, and what it consists of."""
        noise = self._settings.device if features.on_device else self._settings.processor
        count = np.where(features.forwards > 0, features.forwards, np.nan)
        budget = step_s / count
        idle = features.idle_s if whole else np.full(len(count), np.nan)
        doubt = COMPUTE_PART * crowded_s
        readings = [
            self._stall.read(np.fmin(features.stall_s, idle), budget, noise, doubt),
            self._idle.read(idle, budget, noise, doubt),
        ]
        gaps = _strongest(readings)
        queued_s = _on_processor(features.crowded_s, features)
        stopped = self._stopped.read(features.stopped_s, budget, noise, np.zeros(len(count)))
        queued = self._crowded.read(queued_s, budget, noise, np.zeros(len(count)))
        off_cpu = _added(stopped, queued)
        reading = launches.added_to(_added(gaps, off_cpu))
        self._votes_host.add(reading.over, reading.known)
        evidence = _evidence(Cause.HOST, reading, self._votes_host, filled(count), self._harm_s(features, step_s))
        passes_s = features.passes_s
        if np.isfinite(passes_s).any():
            passes_s = np.where(np.isfinite(passes_s), passes_s, median_of_known(passes_s))
        evidence = _against_compute(evidence, passes_s - launches.late.excess * self._chunks)
        evidence = self._with_onsets(evidence, reading.known, on_device=features.on_device)
        return evidence, HostParts(
            gaps_s=np.where(gaps.over, gaps.excess, 0.0),
            off_cpu_s=np.where(off_cpu.over, off_cpu.excess, 0.0),
            stopped_part=_part_over(stopped, features.stopped_s),
            queued_part=_part_over(queued, queued_s),
        )

    def _read_data(self, features: StepFeatures, step_s: float, crowded_s: Floats, *, whole: bool) -> CauseEvidence:
        noise = self._settings.device if features.on_device else self._settings.processor
        count = np.where(features.forwards > 0, features.forwards, np.nan)
        waits = features.data_s if whole else np.full(len(count), np.nan)
        reading = self._data.read(waits, step_s / count, noise, COMPUTE_PART * crowded_s)
        self._votes_data.add(reading.over, reading.known)
        evidence = _evidence(Cause.DATA, reading, self._votes_data, count, self._harm_s(features, step_s))
        evidence = self._with_onsets(evidence, reading.known, on_device=features.on_device)
        return _against_compute(evidence, features.passes_s)

    def _read_link(self, features: StepFeatures, step_s: float, crowded_s: Floats) -> CauseEvidence:
        noise = self._settings.device if features.on_device else self._settings.processor
        columns = self._columns(features.pairs)
        delivery, count = np.full(len(self._pairs), np.nan), np.zeros(len(self._pairs))
        delivery[columns], count[columns] = features.delivery_s, features.messages
        budget = step_s / np.where(count > 0, count, np.nan)
        doubt = HELPER_PART * crowded_s[self.pairs].max(axis=1, initial=0.0)
        reading = self._link.read(delivery, budget, noise, doubt)
        self._votes_link.add(reading.over, reading.known)
        evidence = _evidence(Cause.LINK, reading, self._votes_link, count, self._harm_s(features, step_s))
        return _against_compute(evidence, features.passes_s[self.pairs[:, 1]])

    def _read_imbalance(self, features: StepFeatures) -> CauseEvidence:
        """Compare stages of a single unit with the median of the other stages of their role, over a long window."""
        compute = np.where(self._units.members_in(features.bound), np.nan, self._units.slowest(features.passes_s))
        others = median_of_others_by(compute, self._units.stage // self._stages_of_role)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = compute / others
        known = np.isfinite(ratio) & ~self._units.has_peers
        last = np.isin(self._units.stage, self._loss_stages)
        limit = np.where(last, self._settings.last_stage_ratio, self._settings.imbalance_ratio)
        over = known & (ratio > limit)
        self._votes_imbalance.add(over, known)
        count = self._units.slowest(features.forwards / self._chunks)
        excess = filled(compute - others)
        return CauseEvidence(
            cause=Cause.UNDETERMINED,
            over=over,
            votes=self._votes_imbalance.count - (self._settings.imbalance_steps - self._settings.votes),
            excess_s=excess * filled(count),
            occurrence_s=excess,
            ratio=filled(ratio, 1.0),
            strength=filled(ratio) / limit,
            by_history=np.zeros(len(ratio), np.bool_),
            harmful=np.zeros(len(ratio), np.bool_),
        )

    def _read_regression(self, features: StepFeatures) -> CauseEvidence:
        passes_s = self._units.slowest(features.passes_s)
        found = self._job.read(passes_s) if features.on_device else UNKNOWN
        over, known = np.array([found.over]), np.array([found.known])
        self._votes_job.add(over, known)
        usual_s = median_of_known(passes_s) if np.isfinite(passes_s).any() else 0.0
        excess = np.array([usual_s * -np.expm1(-max(found.size, 0.0))])
        count = float(features.forwards.max(initial=0)) / self._chunks
        return CauseEvidence(
            cause=Cause.REGRESSION,
            over=over,
            votes=self._votes_job.count,
            excess_s=excess * count,
            occurrence_s=excess,
            ratio=np.array([np.exp(found.size)]),
            strength=np.array([found.strength]),
            by_history=np.ones(1, np.bool_),
            harmful=np.zeros(1, np.bool_),
        )

    def _link_peers(self) -> Ints:
        """Number the pairs that are expected to deliver alike: between the same stages, and all or none across nodes.

        A pair without such a peer gets -1, and is judged by its own history.
        """
        kinds = [
            (self._stage_of[source], self._stage_of[target], self._nodes[source] == self._nodes[target])
            for source, target in self._pairs
        ]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds)) if kinds.count(kind) > 1}
        return np.array([numbers.get(kind, -1) for kind in kinds], np.int64)

    def _with_onsets(self, evidence: CauseEvidence, known: Mask, *, on_device: bool) -> CauseEvidence:
        """Return the evidence with the order in which its columns became slow."""
        noise = self._settings.device if on_device else self._settings.processor
        onsets = self._onsets[evidence.cause].add(
            evidence.over,
            known,
            evidence.strength,
            evidence.votes,
            votes_needed=self._settings.confirm_votes - evidence.harmful,
            steps_needed=noise.hits,
            brief=on_device,  # a processor may be busy for some steps
        )
        return dataclasses.replace(evidence, onsets=onsets)

    def _harm_s(self, features: StepFeatures, step_s: float) -> float:
        """Return the excess in a step from which fewer steps suffice; a processor may be busy for a moment."""
        return self._settings.harm * step_s if features.on_device else np.inf

    def _columns(self, pairs: Ints) -> Ints:
        """Return the column of each pair, adding columns for new ones."""
        if np.array_equal(pairs, self._newest[0]):
            return self._newest[1]
        columns = [self._pairs.setdefault((a, b), len(self._pairs)) for a, b in pairs.tolist()]
        if len(self._pairs) > self._votes_link.columns:
            self._link.grow(self._link_peers())
        self._votes_link.grow(len(self._pairs))
        self._newest = pairs, np.array(columns, np.int64)
        return self._newest[1]


def _readers(layout: JobLayout) -> Ints:
    """Number the ranks that read alike: the first member of a tensor-parallel group reads for all of its group."""
    places = [(stage, at.tp, at.cp) for stage, at in zip(layout.stages, layout.coordinates, strict=True)]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return np.array([numbers[place] for place in places], np.int64)


def _evidence(cause: Cause, reading: ChannelReading, votes: VoteWindow, count: Floats, harm_s: float) -> CauseEvidence:
    excess_s = reading.excess * filled(count)
    return CauseEvidence(
        cause=cause,
        over=reading.over,
        votes=votes.count,
        occurrence_s=reading.excess,
        excess_s=excess_s,
        ratio=reading.ratio,
        strength=reading.strength,
        by_history=reading.by_history,
        harmful=excess_s >= harm_s,
    )


def _against_compute(evidence: CauseEvidence, compute_s: Floats) -> CauseEvidence:
    """Express delays as slowdowns: how many times longer than its compute alone a microbatch takes the rank."""
    ratio = 1.0 + evidence.occurrence_s / np.where(compute_s > 0, compute_s, np.nan)
    return dataclasses.replace(evidence, ratio=filled(ratio, 1.0))


def _on_processor(values_s: Floats, features: StepFeatures) -> Floats:
    """Return times of a host; unknown where they do not delay what is recorded, because a device continues."""
    return np.full(len(values_s), np.nan) if features.on_device else values_s


def _part_over(reading: ChannelReading, values_s: Floats) -> Floats:
    """Return which part of each value is excess, 0 to 1; 0 where it is not over."""
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(reading.over, reading.excess / values_s, 0.0)
    out: Floats = np.minimum(filled(part), 1.0)
    return out


def _added(first: ChannelReading, other: ChannelReading) -> ChannelReading:
    """Return the delays of two channels that measure different times: those that are over are added up."""
    over = first.over | other.over
    added = np.where(first.over, first.excess, 0.0) + np.where(other.over, other.excess, 0.0)
    return ChannelReading(
        known=first.known | other.known,
        over=over,
        excess=np.where(over, added, first.excess),
        ratio=np.ones(len(over)),
        strength=np.maximum(first.strength, other.strength),
        by_history=np.where(first.over, first.by_history, np.where(other.over, other.by_history, first.by_history)),
    )


def _strongest(readings: list[ChannelReading]) -> ChannelReading:
    """Return column by column, of the channels of one cause that are over, the reading that costs most."""
    cost = np.stack([np.where(reading.over, reading.excess, -1.0 + reading.strength * 1e-9) for reading in readings])
    best = cost.argmax(axis=0)

    def pick(name: str) -> Floats:
        rows = np.stack([getattr(reading, name) for reading in readings])
        row: Floats = rows[best, np.arange(len(best))]
        return row

    return ChannelReading(
        known=np.logical_or.reduce([reading.known for reading in readings]),
        over=pick("over").astype(np.bool_),
        excess=pick("excess"),
        ratio=pick("ratio"),
        strength=pick("strength"),
        by_history=pick("by_history").astype(np.bool_),
    )
