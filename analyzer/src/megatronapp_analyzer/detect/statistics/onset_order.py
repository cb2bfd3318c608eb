"""Order in which columns became slow: what begins on several ranks for one reason begins in the same step.

Ranks of a node that became slow one after the other have faults of their own. The order shows only while the later rank
is still healthy and the earlier fault is beyond doubt, so both moments are stored for as long as they matter.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask
from megatronapp_analyzer.detect.features import Floats, Ints

QUIET_STRENGTH = 0.5
"""Strength of the evidence, as a part of its limit, below which a column without votes shows no sign of slowness."""
CLEAR_STRENGTH = 1.25
"""Strength from which on a step is clear: some four deviations above that of a column without a sign."""
CLEAR_STEPS = 2
"""Clear steps in a row that establish a slowness. A reason that two ranks have in common may reach the first in the
middle of a step and the second in the next step, but not later."""


@dataclasses.dataclass(frozen=True, slots=True)
class Onsets:
    """Two moments of each column, as numbers of steps; without columns, no order is known."""

    established: Floats
    """Step from which on the column is slow beyond doubt; infinite for all others."""
    quiet: Floats
    """Last step in which it showed no sign of slowness, before it was slow beyond doubt; minus infinity without any."""

    def together(self, columns: Iterable[int]) -> tuple[int, ...]:
        """Return columns in order, without those that were slow beyond doubt while others of them showed no sign."""
        inside = np.array(sorted(columns), np.int64)
        if not len(inside) or not len(self.quiet):
            return tuple(inside.tolist())
        return tuple(inside[self.established[inside] > self.quiet[inside].max()].tolist())

    def may_be_together(self, columns: Iterable[int], others: tuple[int, ...]) -> Mask:
        """Return which columns may have become slow for the same reason as others, neither before nor after them."""
        inside, where = np.array(list(columns), np.int64), list(others)
        if not len(self.quiet):
            return np.ones(len(inside), np.bool_)
        not_before = self.established[inside] > self.quiet[where].max()
        found: Mask = not_before & (self.established[where].min() > self.quiet[inside])
        return found


NO_ORDER = Onsets(np.empty(0), np.empty(0))
"""Order of columns of which none is recorded: all of them may be slow together."""


class OnsetOrder:
    """Moments of each column. A step in which a column is unknown changes nothing for it.

    The order of a slowness that pauses is that of its first onset, until it is forgotten: in the pause, no column with
    the same fault shows a sign.
    """

    def __init__(self, columns: int, forget: int) -> None:
        """`forget`: steps without votes after which a column is healthy again."""
        self._forget = forget
        self._step = 0
        self._steps_over = np.zeros(columns, np.int64)
        self._clear = np.zeros(columns, np.int64)
        """Clear steps in a row up to the newest."""
        self._without = np.zeros(columns, np.int64)
        """Steps in a row without votes."""
        self._established = np.full(columns, np.inf)
        self._quiet = np.full(columns, -np.inf)

    def add(
        self,
        over: Mask,
        known: Mask,
        strength: Floats,
        votes: Ints,
        *,
        votes_needed: Ints,
        steps_needed: int,
        brief: bool,
    ) -> Onsets:
        """Add the judgement of a step, with the votes that include it, and return the moments.

        A slowness is established by `votes_needed` votes after `steps_needed` steps of evidence, and with `brief` also
        by a few clear steps.
        """
        self._step += 1
        over = over & known
        self._without = np.where(votes > 0, 0, self._without + known)
        self._steps_over = np.where(votes > 0, self._steps_over + over, 0)
        self._clear = np.where(known, np.where(over & (strength >= CLEAR_STRENGTH), self._clear + 1, 0), self._clear)
        sure = (votes >= votes_needed) & (self._steps_over >= steps_needed)
        if brief:
            sure |= self._clear >= CLEAR_STEPS
        since = np.where(sure, np.minimum(self._established, self._step), self._established)
        self._established = np.where(self._without < self._forget, since, np.inf)
        quiet = known & (votes == 0) & (strength < QUIET_STRENGTH) & np.isinf(self._established)
        self._quiet = np.where(quiet, self._step, self._quiet)
        return Onsets(self._established, self._quiet)
