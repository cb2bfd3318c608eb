"""Localization of the one late member of a unit whose members meet inside every span, if one is clearly late."""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.candidates import SubjectResolver, SuspectCandidate
from megatronapp_analyzer.detect.features import Floats
from megatronapp_analyzer.detect.units import Units, last_member, lateness
from megatronapp_analyzer.model import StepRecords, SubjectType

LEAST_PART = 0.1
"""Part of the excess of the unit's passes by which the late member must trail."""
FORGET = 0.7
"""Weight of the past in the running mean of lateness."""


class MemberLocalizer:
    """Running mean of how late each member of each suspected unit is."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._late: dict[int, Floats] = {}

    def narrow(self, view: StepRecords, candidate: SuspectCandidate, places: SubjectResolver) -> SuspectCandidate:
        """Return the candidate, narrowed to one rank if its unit has several and one of them is clearly the last."""
        if candidate.subject.type is not SubjectType.RANK or len(candidate.subject.ranks) < 2:
            return candidate
        unit = candidate.columns[0]
        now = lateness(view, self._units.ranks(unit))
        before = self._late.get(unit, now)
        self._late[unit] = late = FORGET * before + (1 - FORGET) * now
        member = last_member(late, LEAST_PART * (1 - 1 / max(candidate.ratio, 1.0)))
        if member is None:
            return candidate
        rank = int(np.array(self._units.ranks(unit))[member])
        return dataclasses.replace(candidate, subject=places.rank(rank))
