"""Neighbours of a suspect: ranks of its node, worker or stage, which may have the same fault, or one of theirs."""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.candidates import CauseEvidence, SubjectResolver, SuspectCandidate
from megatronapp_analyzer.model import Cause, SubjectType

RISING_VOTES = 2
"""Votes from which on a column is about to be a suspect."""


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbours:
    """Neighbours of the ranks of a job; `node_part` of a node's ranks are slow if the node is the subject."""

    places: SubjectResolver
    node_part: float

    def may_be_slow_too(self, candidate: SuspectCandidate, part: CauseEvidence) -> bool:
        """Return true if neighbours on the node are about to become suspects: the node may then be the subject.

        `part` is the evidence for the candidate's cause. Neighbours that became slow before the candidate, or after it,
        have another fault.
        """
        if not _is_about_a_rank(candidate):
            return False
        own = self._ranks(candidate)
        for ranks in self.places.crowds():
            if own < ranks:
                columns = np.array([self._column(candidate, rank) for rank in ranks], np.int64)
                columns = columns[part.votes[columns] >= RISING_VOTES]
                rising = np.count_nonzero(part.onsets.may_be_together(columns, candidate.columns))
                if rising > len(own) and rising >= self.node_part * len(ranks):
                    return True
        return False

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
