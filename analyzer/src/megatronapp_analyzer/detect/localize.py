"""Localization of the one slow member of a unit whose members meet inside every span, if one clearly is."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.candidates import SubjectResolver, SuspectCandidate
from megatronapp_analyzer.detect.causes.collective_transfers import TENSOR_KINDS
from megatronapp_analyzer.detect.causes.compute_cause import LEAST_OPTIMIZER
from megatronapp_analyzer.detect.causes.growth import PartGrowth
from megatronapp_analyzer.detect.features import Floats, Ints, Mask, launched_late
from megatronapp_analyzer.detect.units import Units, last_member, lateness
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.model import RankRecords
from megatronapp_common.trace import FIRST_COLLECTIVE_MASK, PASS_KIND_SHIFT, PASS_KINDS, PASS_NUMBERS, Flag

LEAST_PART = 0.1
"""Part of the excess of the unit's passes by which the slow member must leave them later than the others of a step."""
LEAST_WAITED = 0.5
"""Part of this excess for which the others must wait for it in the collectives of steps with details."""
LEAST_OWN_GROWTH = 0.5
"""Growth of its optimizer, which meets no other rank, as a part of that of the passes, in logarithms."""
LEAST_ALONE = 1 / 3
"""Part of the least growth of an optimizer that must be its own, and not the others having become shorter."""
LEAST_WHOLE = 0.9
"""Part of the collectives of a step with details of which all members must have a record."""
DETAILED_STEPS = 2
"""Steps with details that must agree: a member may pause once, for a collection of garbage or another process."""
FORGET = 0.7
"""Weight of the past in the running means."""
LONGEST_PAUSE = 3
"""Judged steps without suspicion after which what was measured belongs to another fault."""


@dataclasses.dataclass(slots=True)
class _MemberSigns:
    """Signs that a member of a suspected unit is slow; arrays over its members."""

    newest: int
    """Number of the newest judged step in which the unit was suspected."""
    late: Floats
    """How much later than the first one each leaves the passes, as a part of them; a running mean."""
    growth: Floats
    """Growth of each optimizer over its own usual time, in logarithms; a running mean."""
    waited: list[Floats] = dataclasses.field(default_factory=list)
    """Results of `waited_for` in the newest steps with details."""


class MemberLocalizer:
    """Signs of the slow member of each suspected unit, over the steps in which it is suspected."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._signs: dict[int, _MemberSigns] = {}
        self._judged = 0

    def begin_step(self) -> None:
        """Count a judged step, and forget units that have not been suspected for some."""
        self._judged += 1
        self._signs = {
            unit: signs for unit, signs in self._signs.items() if self._judged - signs.newest <= LONGEST_PAUSE
        }

    def read_details(self, step: MatchedStep) -> None:
        """Take a step in which all tensor-parallel collectives are recorded of some ranks; it is not judged."""
        if not self._signs:
            return
        details = DetailedStep.of(step)
        for unit, signs in self._signs.items():
            waited = waited_for(details, self._units.ranks(unit))
            if waited is not None:
                signs.waited = [*signs.waited, waited][-DETAILED_STEPS:]

    def narrow(
        self, step: MatchedStep, candidate: SuspectCandidate, growth: PartGrowth, places: SubjectResolver
    ) -> SuspectCandidate:
        """Return the candidate, narrowed to one rank if its unit has several and one of them is clearly slow.

        Steps with details decide where there are two of them. Other signs name no member where they disagree.
        """
        if len(candidate.columns) > 1 or len(candidate.subject.ranks) < 2:
            return candidate
        unit = candidate.columns[0]
        ranks = self._units.ranks(unit)
        signs = self._read(unit, step, growth.optimizer_own[list(ranks)])
        times = max(candidate.ratio, 1.0)
        if len(signs.waited) == DETAILED_STEPS:
            found = _by_waits(signs, 1 - 1 / times)
        else:
            found = _by_lateness(signs, 1 - 1 / times)
            if not growth.transfers[unit] > math.log(times):  # else links inside the unit may be slow
                found = _by_growth(signs, math.log(times)) | found
        if len(found) != 1:
            return candidate
        ((member, detail),) = found.items()
        return dataclasses.replace(candidate, subject=places.rank(ranks[member]), details=(detail,))

    def _read(self, unit: int, step: MatchedStep, growth: Floats) -> _MemberSigns:
        """Take a judged step in which the unit is suspected."""
        late = lateness(step.view, self._units.ranks(unit))
        growth = growth if np.isfinite(growth).all() else np.zeros(len(growth))
        known = self._signs.get(unit)
        if known is None:
            self._signs[unit] = known = _MemberSigns(newest=self._judged, late=late, growth=growth)
            return known
        known.newest = self._judged
        known.late = FORGET * known.late + (1 - FORGET) * late
        known.growth = FORGET * known.growth + (1 - FORGET) * growth
        return known


def _by_waits(signs: _MemberSigns, excess: float) -> dict[int, str]:
    """Return the member for which the others wait, with a text, if there is one; `excess`: part of the passes."""
    waited = np.min(signs.waited, axis=0)
    member = last_member(waited, LEAST_WAITED * excess)
    if member is None:
        return {}
    return {member: f"in steps with details its group waited for it for {waited[member]:.1%} of the passes"}


def _by_lateness(signs: _MemberSigns, excess: float) -> dict[int, str]:
    """Return the member that leaves passes last."""
    member = last_member(signs.late, LEAST_PART * excess)
    if member is None:
        return {}
    return {member: f"it leaves its passes later than the others of its group, by {signs.late[member]:.1%} of them"}


def _by_growth(signs: _MemberSigns, passes_growth: float) -> dict[int, str]:
    """Return the member whose optimizer has grown, and no other; `passes_growth` in logarithms.

    Where those of the others have become shorter, as after a change of their clocks, it is compared with them.
    """
    others = np.array([np.median(np.delete(signs.growth, member)) for member in range(len(signs.growth))])
    has_grown = signs.growth > LEAST_ALONE * LEAST_OPTIMIZER
    grown = np.where(has_grown, signs.growth - np.minimum(others, 0.0), 0.0)
    member = last_member(grown, max(LEAST_OWN_GROWTH * passes_growth, LEAST_OPTIMIZER))
    if member is None:
        return {}
    longer = math.expm1(grown[member])
    return {member: f"its optimizer has become {longer:.1%} longer than those of the others of its group"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetailedStep:
    """Passes and tensor-parallel collectives of a step, by rank."""

    passes: RankRecords
    late: Mask
    """Passes that their host launched late."""
    collectives: RankRecords
    """Collectives that were recorded by devices."""

    @classmethod
    def of(cls, step: MatchedStep) -> "DetailedStep":
        """Find them once for all units."""
        chosen = rec.is_kind(step.spans["kind"], PASS_KINDS)
        collectives = step.of_kinds(TENSOR_KINDS)
        collectives = collectives[(collectives["flags"] & Flag.DEVICE_CLOCK) != 0]
        return cls(
            passes=step.spans[chosen],
            late=launched_late(step)[chosen],
            collectives=collectives[np.argsort(collectives["rank"], kind="stable")],
        )


def waited_for(step: DetailedStep, ranks: Sequence[int]) -> Floats | None:
    """Return how much less than the one that waits most each of `ranks` waits in collectives, as a part of the passes.

    The kernel of a collective waits on each device for those that begin it later. Of the passes of a kind it is the
    median, so that a pause in one of them does not matter. None where not all of the ranks have recorded more than the
    first collective of each pass, where records were lost, and where the host of one of them launches most passes late,
    as it may for what is recorded.
    """
    rows = _rows_of(step.passes["rank"], ranks)
    passes, late = step.passes[rows], step.late[rows]
    collectives = step.collectives[_rows_of(step.collectives["rank"], ranks)]
    of_pass, of_collective = (np.searchsorted(ranks, each["rank"]) for each in (passes, collectives))
    all_passes, late_passes = (np.bincount(places, minlength=len(ranks)) for places in (of_pass, of_pass[late]))
    if (2 * late_passes > all_passes).any():
        return None
    ordinal = collectives["ordinal"].astype(np.int64)
    key = (collectives["kind"].astype(np.int64) << 32) | ordinal
    keys, instance, count = np.unique(key, return_inverse=True, return_counts=True)
    whole = count == len(ranks)
    if not (whole & ((keys & FIRST_COLLECTIVE_MASK) != 0)).any() or whole.mean() < LEAST_WHOLE:
        return None
    chosen = whole[instance]
    names, row = np.unique(ordinal[chosen] & ~FIRST_COLLECTIVE_MASK, return_inverse=True)
    spent_s = np.zeros((len(names), len(ranks)))
    np.add.at(spent_s, (row, of_collective[chosen]), rec.durations_s(collectives[chosen]))
    waited_s, length_s = np.zeros(len(ranks)), 0.0
    for kind in PASS_KINDS:
        own = (names >> PASS_KIND_SHIFT) == PASS_NUMBERS[kind]
        lengths_s = rec.durations_s(passes[passes["kind"] == kind])
        if own.any() and len(lengths_s):
            waited_s += np.median(spent_s[own].max(axis=1, keepdims=True) - spent_s[own], axis=0)
            length_s += float(np.median(lengths_s))
    return waited_s / length_s if length_s > 0 else None


def _rows_of(rank: NDArray[np.integer], ranks: Sequence[int]) -> Ints:
    """Return the rows of `ranks`, from the rank of each row, which are sorted by rank."""
    begin, end = np.searchsorted(rank, ranks), np.searchsorted(rank, ranks, side="right")
    return np.concatenate([np.arange(first, last) for first, last in zip(begin, end, strict=True)])
