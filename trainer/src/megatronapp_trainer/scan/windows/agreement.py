"""Agreement of each tensor group on the level of its next step, by sums that every step computes anyway.

All ranks of an NCCL communicator must capture a collective in a CUDA graph and replay it, or none of them
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html). A step with a window launches the
collectives of its passes, other steps replay them. A window of the control page may reach the ranks of a tensor group
before different steps, so that no rank follows its own page: in the reduction of a step's loss each rank announces the
level that its page requests for the next step, and the most detailed level that a rank of a group announced holds for
them all. So a rank that does not know of a window yet records it with its group.
"""

import math
from collections.abc import Sequence

from megatronapp_trainer.scan.windows.plan import TraceLevel

_EXACT = 2**53
"""Integers up to this one are exact in fp64, in any order of addition."""


class PackedLevels:
    """Levels that the ranks of all tensor groups announce, as a few numbers to add up over all ranks.

    Each group has a digit to the base (T + 1)^2, for T ranks in a group: T + 1 for each rank that announces LAYER, and
    1 for each that announces COLLECTIVE. A number holds as many digits as fp64 adds exactly.
    """

    def __init__(self, groups: int, members: int) -> None:
        """Take the number of tensor groups, and that of the ranks in each."""
        self._weights = {TraceLevel.PHASE: 0, TraceLevel.COLLECTIVE: 1, TraceLevel.LAYER: members + 1}
        self._base = (members + 1) ** 2
        self._digits = 0  # counted in integers: a logarithm might be too large by its last bit
        while self._base ** (self._digits + 1) <= _EXACT:
            self._digits += 1
        self.length = math.ceil(groups / self._digits)
        """Number of the numbers."""

    def announcement(self, group: int, level: TraceLevel) -> list[float]:
        """Return the numbers of a rank of a group that announces a level; all are 0 for PHASE."""
        numbers = [0.0] * self.length
        place, digit = divmod(group, self._digits)
        numbers[place] = float(self._weights[level] * self._base**digit)
        return numbers

    def level(self, sums: Sequence[float], group: int) -> TraceLevel:
        """Return the most detailed level that a rank of a group announced, from the sums over all ranks."""
        place, digit = divmod(group, self._digits)
        announced = int(sums[place]) // self._base**digit % self._base
        return max(level for level, weight in self._weights.items() if weight <= announced)


class LevelAgreement:
    """The levels on which the tensor groups of a job agreed, as a rank knows them."""

    def __init__(self, packed: PackedLevels, group: int) -> None:
        """Take the number of this rank's tensor group, among all of the job."""
        self._packed = packed
        self._group = group
        self._step = -1
        self._level = TraceLevel.PHASE
        self._is_anywhere = False

    def announcement(self, level: TraceLevel) -> Sequence[float]:
        """Return what to add up over all ranks, for the level that this rank's page requests for the next step."""
        return self._packed.announcement(self._group, level)

    def take(self, step: int, sums: Sequence[float]) -> None:
        """Take the sums, which hold for `step`."""
        self._step = step
        self._level = self._packed.level(sums, self._group)
        self._is_anywhere = any(sums)

    def level(self, step: int) -> TraceLevel:
        """Return the level of this rank's group in a step; PHASE if none was agreed on, as for the first step."""
        return self._level if step == self._step else TraceLevel.PHASE

    def is_anywhere(self, step: int) -> bool:
        """Return True if some group of the job has a window in a step."""
        return step == self._step and self._is_anywhere
