"""Localization of the one slow member of a unit whose members meet inside every span, if one clearly is."""

import dataclasses
import math

import numpy as np

from megatronapp_analyzer.detect.candidates import SubjectResolver, SuspectCandidate
from megatronapp_analyzer.detect.causes.collective_transfers import TENSOR_KINDS
from megatronapp_analyzer.detect.causes.compute_cause import LEAST_OPTIMIZER
from megatronapp_analyzer.detect.features import Floats, Ints, launched_late
from megatronapp_analyzer.detect.units import Units, last_member, lateness
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.model import RankRecords
from megatronapp_common.trace import PASS_KINDS, Flag

LEAST_PART = 0.1
"""Part of the excess of the unit's passes by which the slow member must leave them later than the others."""
LEAST_WAITED = 0.5
"""Part of this excess for which the others must wait for it in the collectives of a step with details."""
LEAST_OWN_GROWTH = 0.5
"""Growth of its optimizer, which meets no other rank, as a part of that of the passes, in logarithms."""
FORGET = 0.7
"""Weight of the past in the running means."""
LONGEST_PAUSE = 10
"""Steps without suspicion after which what was measured belongs to another fault."""


@dataclasses.dataclass(slots=True)
class _MemberSigns:
    """What shows which member of a suspected unit is the slow one; arrays over its members."""

    step: int
    """Newest step in which the unit was suspected."""
    late: Floats
    """How much later than the first one each leaves the passes, as a part of them; a running mean."""
    growth: Floats
    """Growth of each optimizer, in logarithms; a running mean."""
    waited: Floats | None = None
    """How much less than the others each waits in collectives, as a part of the passes; None without details."""


class MemberLocalizer:
    """Signs of the slow member of each suspected unit, over the steps in which it is suspected."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._signs: dict[int, _MemberSigns] = {}

    def read_details(self, step: MatchedStep) -> None:
        """Take a step in which all tensor-parallel collectives are recorded."""
        for unit, signs in self._signs.items():
            if step.view.step - signs.step <= LONGEST_PAUSE:
                waited = waited_for(step, self._units.ranks(unit))
                signs.waited = signs.waited if waited is None else waited

    def narrow(
        self, step: MatchedStep, candidate: SuspectCandidate, growth: Floats, places: SubjectResolver
    ) -> SuspectCandidate:
        """Return the candidate, narrowed to one rank if its unit has several and one of them is clearly slow.

        `growth` is that of the optimizer of each rank of the job, in logarithms; NaN where unknown.
        """
        if len(candidate.columns) > 1 or len(candidate.subject.ranks) < 2:
            return candidate
        ranks = self._units.ranks(candidate.columns[0])
        signs = self._read(candidate.columns[0], step, growth[list(ranks)])
        excess = 1 - 1 / max(candidate.ratio, 1.0)
        member = last_member(signs.late, LEAST_PART * excess)
        detail = "it leaves its passes later than the others of its group, by {:.1%} of their length"
        sizes = signs.late
        if member is None and signs.waited is not None:
            member, sizes = last_member(signs.waited, LEAST_WAITED * excess), signs.waited
            detail = "in a step with details the others of its group waited for it for {:.1%} of their passes"
        if member is None:
            least = max(LEAST_OWN_GROWTH * math.log(max(candidate.ratio, 1.0)), LEAST_OPTIMIZER)
            sizes = np.expm1(np.maximum(signs.growth, 0.0))
            member = last_member(sizes, math.expm1(least))
            detail = "its optimizer takes {:.1%} longer than usual, which those of the others of its group do not"
        if member is None:
            return candidate
        return dataclasses.replace(
            candidate, subject=places.rank(ranks[member]), details=(detail.format(sizes[member]),)
        )

    def _read(self, unit: int, step: MatchedStep, growth: Floats) -> _MemberSigns:
        """Take a step in which the unit is suspected."""
        number, late = step.view.step, lateness(step.view, self._units.ranks(unit))
        growth = growth if np.isfinite(growth).all() else np.zeros(len(growth))
        known = self._signs.get(unit)
        if known is None or number - known.step > LONGEST_PAUSE:
            self._signs[unit] = known = _MemberSigns(step=number, late=late, growth=growth)
            return known
        known.step = number
        known.late = FORGET * known.late + (1 - FORGET) * late
        known.growth = FORGET * known.growth + (1 - FORGET) * growth
        return known


def waited_for(step: MatchedStep, ranks: tuple[int, ...]) -> Floats | None:
    """Return how much less than the one that waits most each of `ranks` waits in collectives, as a part of the passes.

    The kernel of a collective waits on each device for those that begin it later. None where a host launches the
    passes late, as it may for what is recorded alone, and where the collectives are not those of a device.
    """
    records = step.view.records
    own = records[np.isin(records["rank"], ranks)]
    place = np.searchsorted(ranks, own["rank"])
    passes = rec.is_kind(own["kind"], PASS_KINDS)
    length_s = np.bincount(place[passes], rec.durations_s(own[passes]), minlength=len(ranks)).max(initial=0.0)
    meetings = rec.is_kind(own["kind"], TENSOR_KINDS) & ((own["flags"] & Flag.DEVICE_CLOCK) != 0)
    if not meetings.any() or length_s <= 0 or _is_launched_late(step, ranks):
        return None
    spent_s = _seconds_in_whole(own[meetings], place[meetings], len(ranks))
    waited: Floats = (spent_s.max() - spent_s) / length_s
    return waited


def _seconds_in_whole(collectives: RankRecords, place: Ints, members: int) -> Floats:
    """Return the seconds of each member in those collectives of which every member has a record."""
    key = (collectives["kind"].astype(np.int64) << 32) | collectives["ordinal"].astype(np.int64)
    _, instance, count = np.unique(key, return_inverse=True, return_counts=True)
    whole = (count == members)[instance]
    seconds: Floats = np.bincount(place[whole], rec.durations_s(collectives[whole]), minlength=members).astype(
        np.float64
    )
    return seconds


def _is_launched_late(step: MatchedStep, ranks: tuple[int, ...]) -> bool:
    """Return whether the hosts of `ranks` decide the length of most of their passes."""
    spans = step.spans
    passes = rec.is_kind(spans["kind"], PASS_KINDS) & np.isin(spans["rank"], ranks)
    return 2 * int(launched_late(step)[passes].sum()) > int(passes.sum())
