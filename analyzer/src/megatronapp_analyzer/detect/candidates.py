"""Grouping of slow columns into subjects: nodes, workers, stages, units, ranks and links; culprits before victims."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.statistics.onset_order import NO_ORDER, Onsets
from megatronapp_analyzer.detect.units import Units
from megatronapp_analyzer.detect.work import StepWork, work_details
from megatronapp_analyzer.model import Cause, JobLayout, SubjectType, VerdictSubject

ALIKE_PART = 0.5
"""Largest difference between the slowdowns of a node's units, as a part of their median in logarithms."""
ALIKE_LEAST = 0.04
"""The same in logarithms, for slowdowns that are about as large as their noise."""
EXPLAINS = 0.5
"""A member's own stall or late input explains its unit's slow compute if it costs at least this part of it."""

EXPLAINS_ALONE = 3.0
"""The same where no others meet the rank inside its spans: a host that stalls launches some kernels late."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CauseEvidence:
    """Evidence of all channels for one cause in one step, per column, with the votes of the last steps."""

    cause: Cause
    over: Mask
    votes: Ints
    excess_s: Floats
    """Excess in seconds per step."""
    occurrence_s: Floats
    """Excess in seconds per microbatch or message."""
    ratio: Floats
    strength: Floats
    by_history: Mask
    harmful: Mask
    """Columns that cost so much of a step that fewer steps suffice."""
    onsets: Onsets = NO_ORDER
    """Order in which columns became slow; not recorded for causes that no neighbours share."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuspectCandidate:
    """A subject with the columns that are evidence against it."""

    subject: VerdictSubject
    cause: Cause
    columns: tuple[int, ...]
    votes: int
    excess_s: float
    occurrence_s: float
    ratio: float
    by_history: bool
    harmful: bool = False
    """True if one step less suffices, because it costs so much of a step."""
    sends: bool = False
    """True if all that a rank sends is late."""
    receives: bool = False
    """True if all that it receives is late."""
    details: tuple[str, ...] = ()
    """Further evidence, as text."""

    @property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        """Identity of the candidate across steps."""
        return (str(self.subject.type), self.subject.ranks, str(self.cause))


def _ranks_by_place(places: Sequence[object]) -> Iterable[tuple[int, ...]]:
    """Return the ranks of each place, from the place of each rank, in the order in which places occur."""
    ranks: dict[object, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    return map(tuple, ranks.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SubjectResolver:
    """Placement of ranks, and the subjects that several of them can make up."""

    layout: JobLayout
    units: Units
    _shared: tuple[tuple[VerdictSubject, frozenset[int]], ...] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shared", tuple(self._find_shared()))

    def rank(self, rank: int) -> VerdictSubject:
        return self._subject(SubjectType.RANK, (rank,))

    def unit(self, unit: int) -> VerdictSubject:
        """Return the subject of a unit: of type rank, also for several ranks that cannot be separated."""
        return self._subject(SubjectType.RANK, self.units.ranks(unit))

    def link(self, source: int, destination: int) -> VerdictSubject:
        """Return the subject of a directed pair."""
        return VerdictSubject(type=SubjectType.LINK, ranks=(source, destination))

    def replica(self, replica: int) -> VerdictSubject:
        """Return the subject of a data-parallel replica: all its ranks, or its only rank."""
        ranks = tuple(rank for rank, at in enumerate(self.layout.coordinates) if at.dp == replica)
        return self._subject(SubjectType.REPLICA if len(ranks) > 1 else SubjectType.RANK, ranks)

    def group(self, ranks: tuple[int, ...]) -> VerdictSubject:
        """Return the subject of ranks between which links are slow."""
        return self._subject(SubjectType.GROUP, ranks)

    def link_cause(self, ranks: Iterable[int], *, on_device: bool) -> Cause:
        """Return the cause of slow links between ranks: devices of one node have no network between them."""
        within = len({self.layout.nodes[rank] for rank in ranks}) == 1
        return Cause.NODE_LINK if on_device and within else Cause.LINK

    def stage(self, stage: int) -> VerdictSubject:
        """Return the subject of all ranks of a pipeline stage."""
        ranks = [rank for rank, own in enumerate(self.layout.stages) if own == stage]
        return VerdictSubject(type=SubjectType.STAGE, ranks=tuple(ranks))

    def job(self) -> VerdictSubject:
        """Return the subject of all ranks."""
        return self._subject(SubjectType.JOB, tuple(range(self.layout.world)))

    def shared(self) -> Iterable[tuple[VerdictSubject, frozenset[int]]]:
        """Return nodes, then workers, that hold several ranks but not all."""
        return self._shared

    def _find_shared(self) -> Iterable[tuple[VerdictSubject, frozenset[int]]]:
        layout = self.layout
        for kind, places in ((SubjectType.NODE, layout.nodes), (SubjectType.WORKER, layout.workers)):
            for ranks in _ranks_by_place(places):
                if 1 < len(ranks) < layout.world:
                    yield self._subject(kind, ranks), frozenset(ranks)

    def crowds(self) -> Iterable[frozenset[int]]:
        """Yield all sets of ranks that can be slow together for one reason: nodes, workers, stages."""
        for _, ranks in self.shared():
            yield ranks
        for stage in dict.fromkeys(self.layout.stages):
            ranks = frozenset(self.stage(stage).ranks)
            if 1 < len(ranks) < self.layout.world:
                yield ranks

    def _subject(self, kind: SubjectType, ranks: tuple[int, ...]) -> VerdictSubject:
        workers = {self.layout.workers[rank] for rank in ranks}
        nodes = {self.layout.nodes[rank] for rank in ranks}
        return VerdictSubject(
            type=kind,
            ranks=ranks,
            worker=workers.pop() if len(workers) == 1 else None,
            node=nodes.pop() if len(nodes) == 1 else None,
        )


def of_compute(
    evidence: CauseEvidence, active: Ints, places: SubjectResolver, settings: DetectorSettings
) -> list[SuspectCandidate]:
    """Return slow units, grouped where they share a node, a worker, or (all of them) a stage."""
    left = {int(unit) for unit in active}
    found = []
    ranks_of = {unit: frozenset(places.units.ranks(unit)) for unit in left}
    for subject, ranks in places.shared() if len(left) > 1 else ():
        inside = evidence.onsets.together(unit for unit in left if ranks_of[unit] <= ranks)
        most = sum(len(ranks_of[unit]) for unit in inside) >= settings.group_share * len(ranks)
        if len(inside) > 1 and most and _has_common_reason(evidence, inside, ranks, places):
            found.append(_candidate(evidence, inside, subject))
            left -= set(inside)
    for stage in sorted({int(places.units.stage[unit]) for unit in left}):
        inside = tuple(int(unit) for unit in np.flatnonzero(places.units.stage == stage))
        slow = len(inside) > 1 and set(inside) <= left and len(inside) < len(places.units)
        if slow and inside == evidence.onsets.together(inside) and _are_alike(evidence, inside):
            found.append(_candidate(evidence, inside, places.stage(stage), Cause.UNDETERMINED))
            left -= set(inside)
    return found + [_candidate(evidence, (unit,), places.unit(unit)) for unit in sorted(left)]


def _has_common_reason(
    evidence: CauseEvidence, inside: tuple[int, ...], ranks: frozenset[int], places: SubjectResolver
) -> bool:
    """Return whether slow units of a node may have the same reason, and not several faults of about the same time.

    Then their slowdowns are alike, and none of the others there is healthy in all of the last steps.
    """
    if not _are_alike(evidence, inside):
        return False
    others = {int(places.units.of_rank[rank]) for rank in ranks} - set(inside)
    return bool((evidence.votes[sorted(others)] > 0).all())


def _are_alike(evidence: CauseEvidence, inside: tuple[int, ...]) -> bool:
    """Return whether columns are slower by about the same factor."""
    logs = np.log(np.maximum(evidence.ratio[list(inside)], 1.0))
    return bool(np.ptp(logs) <= max(ALIKE_PART * float(np.median(logs)), ALIKE_LEAST))


def of_host(
    evidence: CauseEvidence, active: Ints, places: SubjectResolver, settings: DetectorSettings
) -> list[SuspectCandidate]:
    """Return stalling ranks, grouped where they share a node or a worker."""
    left = {int(rank) for rank in active}
    found = []
    for subject, ranks in places.shared() if len(left) > 1 else ():
        inside = evidence.onsets.together(left & ranks)
        if len(inside) > 1 and len(inside) >= settings.group_share * len(ranks):
            found.append(_candidate(evidence, inside, subject))
            left -= set(inside)
    return found + [_candidate(evidence, (rank,), places.rank(rank)) for rank in sorted(left)]


def of_links(
    evidence: CauseEvidence, active: Ints, pairs: Ints, places: SubjectResolver, *, on_device: bool
) -> list[SuspectCandidate]:
    """Return late links; where every message to a rank, or from it, is late, that rank."""
    left = {int(pair) for pair in active}
    found = []
    for rank in sorted({int(end) for pair in left for end in pairs[pair]}):
        ends = {side: [int(pair) for pair in np.flatnonzero(pairs[:, side] == rank)] for side in (1, 0)}
        late = {side: end for side, end in ends.items() if len(end) > 1 and set(end) <= left}
        columns = tuple(dict.fromkeys(pair for end in late.values() for pair in end))
        if columns:
            candidate = _candidate(evidence, columns, places.rank(rank))
            found.append(dataclasses.replace(candidate, sends=0 in late, receives=1 in late))
            left -= set(columns)
    for pair in sorted(left):
        found.append(_candidate(evidence, (pair,), places.link(int(pairs[pair, 0]), int(pairs[pair, 1]))))
    return [
        dataclasses.replace(
            candidate, cause=places.link_cause(pairs[list(candidate.columns)].ravel().tolist(), on_device=on_device)
        )
        for candidate in found
    ]


def of_groups(
    evidence: CauseEvidence, active: Ints, groups: tuple[tuple[int, ...], ...], places: SubjectResolver
) -> list[SuspectCandidate]:
    """Return groups of devices whose transfers take longer."""
    return [
        _candidate(
            evidence, (int(group),), places.group(groups[group]), places.link_cause(groups[group], on_device=True)
        )
        for group in active
    ]


def of_replicas(
    evidence: CauseEvidence, active: Ints, work: StepWork | None, places: SubjectResolver
) -> list[SuspectCandidate]:
    """Return replicas that get more work."""
    found = [_candidate(evidence, (int(replica),), places.replica(int(replica))) for replica in active]
    if work is None:
        return found
    return [
        dataclasses.replace(candidate, details=work_details(work, candidate.columns[0], candidate.ratio))
        for candidate in found
    ]


def of_job(evidence: CauseEvidence, active: Ints, places: SubjectResolver) -> list[SuspectCandidate]:
    """Return the job, where all its ranks are slower than before."""
    return [_candidate(evidence, (int(column),), places.job()) for column in active]


def of_imbalance(evidence: CauseEvidence, active: Ints, places: SubjectResolver) -> list[SuspectCandidate]:
    """Return stages that take much longer than the others, where neither peers nor a healthy history are conclusive."""
    stages = sorted({int(places.units.stage[unit]) for unit in active})
    return [
        _candidate(
            evidence, tuple(int(unit) for unit in active if places.units.stage[unit] == stage), places.stage(stage)
        )
        for stage in stages
    ]


def without_explained(
    compute: list[SuspectCandidate], others: list[SuspectCandidate], places: SubjectResolver
) -> list[SuspectCandidate]:
    """Drop units whose slow compute is explained by a member's own stall or late input."""
    return [candidate for candidate in compute if not any(_explains(other, candidate, places) for other in others)]


def _explains(other: SuspectCandidate, candidate: SuspectCandidate, places: SubjectResolver) -> bool:
    coupled = any(len(places.units.ranks(unit)) > 1 for unit in candidate.columns)
    part = EXPLAINS if coupled else EXPLAINS_ALONE
    touched = {other.subject.ranks[-1]} if other.subject.type is SubjectType.LINK else set(other.subject.ranks)
    return bool(touched & set(candidate.subject.ranks)) and other.excess_s >= part * candidate.excess_s


def _candidate(
    evidence: CauseEvidence, columns: tuple[int, ...], subject: VerdictSubject, cause: Cause | None = None
) -> SuspectCandidate:
    where = list(columns)
    return SuspectCandidate(
        subject=subject,
        cause=cause or evidence.cause,
        columns=columns,
        votes=int(evidence.votes[where].min()),
        excess_s=float(evidence.excess_s[where].max()),
        occurrence_s=float(evidence.occurrence_s[where].max()),
        ratio=float(np.median(evidence.ratio[where])),
        by_history=bool(evidence.by_history[where].all()),
        harmful=bool(evidence.harmful[where].all()),
    )
