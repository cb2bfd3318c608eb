"""Control of a training at its step boundaries, as the loop sees it: a run without control imports no more of it."""

import enum
from typing import Protocol


class BoundaryDecision(enum.Enum):
    """Course of the training after a step boundary."""

    CONTINUE = enum.auto()
    STOP = enum.auto()
    """End as ordered, with a checkpoint."""
    PREEMPT = enum.auto()
    """End as a signal to some rank asks, which arrived in a pause."""


class BoundaryControl(Protocol):
    """Control of a training on one of its ranks."""

    def at_boundary(self, iteration: int) -> BoundaryDecision:
        """Obey the orders that hold after `iteration` steps; collective over all ranks of the job."""

    def close(self) -> None:
        """End the control after the last step; collective."""
