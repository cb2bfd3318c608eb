"""Steps at the start of a training that are measured in each mode of shipping, and the choice among the modes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatronapp_trainer.config import ShipMode

WARM_UP_STEPS = 1
"""Steps of a mode before its measured ones: allocators and connections get its sizes in them."""
MEASURED_STEPS = 2
"""Steps of a mode whose times count: the shorter one, as other work on the machine only makes a step longer."""


class StepSeconds(NamedTuple):
    """Seconds of a step on one rank; those of a microbatch are of all chunks of the rank together."""

    step: float
    """From the step's command to the end of the last pass."""
    forward: float
    """Forward passes of a microbatch."""
    backward: float
    """Backward passes of a microbatch, with the weight gradients."""
    ship: float
    """Time in which shipments of a microbatch are copied."""


class MeasuredSteps:
    """Gives the mode of each measured step, in turns, and keeps the times of this rank.

    Steps of another number of microbatches, as in a ramp-up, are not comparable: all is measured again.
    """

    def __init__(self, modes: Sequence[ShipMode]) -> None:
        """Take the modes in the order in which they are measured."""
        self._modes = tuple(modes)
        self._microbatches = 0
        self._steps: list[StepSeconds] = []

    @property
    def is_complete(self) -> bool:
        """Return whether all modes are measured."""
        return len(self._steps) == len(self._modes) * (WARM_UP_STEPS + MEASURED_STEPS)

    def begin_step(self, num_microbatches: int) -> ShipMode:
        """Return the mode of the step that begins; there is a step that is not measured."""
        if num_microbatches != self._microbatches:
            self._steps.clear()
            self._microbatches = num_microbatches
        return self._modes[len(self._steps) // (WARM_UP_STEPS + MEASURED_STEPS)]

    def end_step(self, seconds: StepSeconds) -> None:
        """Take the times of the step that has begun last."""
        self._steps.append(seconds)

    def shortest(self) -> dict[ShipMode, StepSeconds]:
        """Return the shorter step of each mode, once all are measured."""
        count = WARM_UP_STEPS + MEASURED_STEPS
        return {
            mode: min(self._steps[place * count + WARM_UP_STEPS : (place + 1) * count])
            for place, mode in enumerate(self._modes)
        }


def slowest(ranks: Iterable[Mapping[ShipMode, StepSeconds]]) -> dict[ShipMode, StepSeconds]:
    """Return the times of all ranks of the role as one: of each mode and kind the longest."""
    by_rank = list(ranks)
    return {
        mode: StepSeconds(*(max(times) for times in zip(*(rank[mode] for rank in by_rank), strict=True)))
        for mode in by_rank[0]
    }


def fastest_mode(seconds: Mapping[ShipMode, StepSeconds]) -> ShipMode:
    """Return the mode with the shortest step; of equal ones the first, which recomputes least."""
    return min(seconds, key=lambda mode: seconds[mode].step)


def covered_seconds(intervals_ns: Iterable[tuple[int, int]]) -> float:
    """Return the time that intervals in nanoseconds cover together; those of several threads overlap."""
    covered, last_end = 0, 0
    for start, end in sorted(intervals_ns):
        covered += max(end - max(start, last_end), 0)
        last_end = max(last_end, end)
    return 1e-9 * covered
