"""Neighbours of a suspect: ranks of its node, worker or stage, which may have the same fault, or one of theirs."""

import dataclasses

from megatronapp_analyzer.detect.candidates import CauseEvidence, HealthyThen, SubjectResolver, SuspectCandidate
from megatronapp_analyzer.model import Cause, SubjectType

RISING_VOTES = 2
"""Votes from which on a column is about to be a suspect."""
RISING_STRENGTH = 0.5
"""Strength of the evidence, as a part of its limit, below which a column without votes is healthy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbours:
    """Neighbours of the ranks of a job; `node_part` of a node's ranks are slow if the node is the subject."""

    places: SubjectResolver
    node_part: float

    def may_be_slow_too(self, candidate: SuspectCandidate, part: CauseEvidence, healthy_then: HealthyThen) -> bool:
        """Return true if neighbours on the node are about to become suspects: the node may then be the subject.

        `part` is the evidence for the candidate's cause. Neighbours that were slow while the candidate was healthy have
        another fault.
        """
        if not _is_about_a_rank(candidate):
            return False
        own = self._ranks(candidate)
        for ranks in self.places.crowds():
            if own < ranks:
                columns = [self._column(candidate, rank) for rank in ranks]
                earlier = {column for column in columns if healthy_then.get(column, frozenset()) & {*candidate.columns}}
                rising = sum(part.votes[column] >= RISING_VOTES and column not in earlier for column in columns)
                if rising > len(own) and rising >= self.node_part * len(ranks):
                    return True
        return False

    def healthy(self, candidate: SuspectCandidate, part: CauseEvidence) -> frozenset[int]:
        """Return the columns of neighbours that show no sign of the suspect's sort of fault."""
        if not _is_about_a_rank(candidate):
            return frozenset()
        own = self._ranks(candidate)
        near = {self._column(candidate, rank) for ranks in self.places.crowds() if own < ranks for rank in ranks}
        return frozenset(
            column for column in near if part.votes[column] == 0 and part.strength[column] < RISING_STRENGTH
        )

    def _ranks(self, candidate: SuspectCandidate) -> set[int]:
        """Return the ranks of a candidate's columns."""
        if candidate.cause is not Cause.COMPUTE:
            return set(candidate.subject.ranks)
        return {rank for unit in candidate.columns for rank in self.places.units.ranks(unit)}

    def _column(self, candidate: SuspectCandidate, rank: int) -> int:
        """Return the column of a rank in the evidence for a candidate's cause."""
        return int(self.places.units.of_rank[rank]) if candidate.cause is Cause.COMPUTE else rank


def _is_about_a_rank(candidate: SuspectCandidate) -> bool:
    """Return whether a candidate is about a rank, or a unit, whose neighbours may have the same fault."""
    ranked = (Cause.COMPUTE, Cause.HOST, Cause.DATA)
    return candidate.subject.type is SubjectType.RANK and candidate.cause in ranked
