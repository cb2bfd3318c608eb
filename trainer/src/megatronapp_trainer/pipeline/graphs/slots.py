"""Slots of replayed passes: which static memory the passes of a microbatch use, and when it is free again.

A recorded pass reads and writes the same memory in each replay. Between the forward and the last backward pass of a
microbatch that memory holds its activations, so that a chunk needs as many recordings of its passes as it has
microbatches in flight. Each of them is a slot. Which slot a microbatch gets is a function of the order of passes alone,
so that ranks of a tensor group, which run one order, replay the same collectives.
"""

import dataclasses
from collections.abc import Sequence

from megatronapp_trainer.errors import SlotsExhaustedError, TaskOrderError
from megatronapp_trainer.pipeline.planning.orders import Order
from megatronapp_trainer.pipeline.planning.tasks import TaskKind


@dataclasses.dataclass(frozen=True, slots=True)
class SlotLimits:
    """Slots of each chunk of a rank in a step."""

    counts: tuple[int, ...]
    """By chunk."""
    is_exact: bool = True
    """No order of the step needs more; False: passes that find no slot run without a recording."""


def slots_of_order(order: Order, chunks: int) -> SlotLimits:
    """Return the slots that an order needs: the most microbatches of each chunk that are in flight at a time.

    A microbatch is in flight from its forward to its backward task, or to its weight task if the order has such tasks.
    """
    last = TaskKind.WEIGHT if any(task.kind is TaskKind.WEIGHT for task in order) else TaskKind.BACKWARD
    used, peaks = [0] * chunks, [0] * chunks
    for task in order:
        used[task.chunk] += (task.kind is TaskKind.FORWARD) - (task.kind is last)
        peaks[task.chunk] = max(peaks[task.chunk], used[task.chunk])
    return SlotLimits(tuple(peaks))


class SlotPool:
    """The slots of a rank's chunks in a step, numbered from 0 for each chunk."""

    def __init__(self) -> None:
        self._limits = SlotLimits(())
        self._free: list[list[int]] = []
        self._in_flight: dict[tuple[int, int], int] = {}
        self.shortages = 0
        """Passes of the step that found no slot."""

    @property
    def in_flight(self) -> dict[tuple[int, int], int]:
        """Return the slot of each chunk and microbatch in flight."""
        return dict(self._in_flight)

    def begin_step(self, limits: SlotLimits) -> None:
        """Begin a step in which all slots are free. Raises TaskOrderError if a pass of the step before has not run."""
        self.end_step()
        self._limits = limits
        self._free = [list(range(count)) for count in limits.counts]
        self.shortages = 0

    def take(self, chunk: int, microbatch: int) -> int | None:
        """Return the slot for the passes of a microbatch, the free one with the lowest number.

        Returns None if all are held and the limits are not exact.

        Raises:
            SlotsExhaustedError: all slots of the chunk are held, of which an order of this step cannot need more.
            TaskOrderError: the microbatch has a slot already.
        """
        if (chunk, microbatch) in self._in_flight:
            raise TaskOrderError(f"microbatch {microbatch} of chunk {chunk} begins again before its passes have ended")
        free = self._free[chunk]
        if free:
            slot = min(free)
            free.remove(slot)
            self._in_flight[chunk, microbatch] = slot
            return slot
        if self._limits.is_exact:
            raise SlotsExhaustedError(
                f"microbatch {microbatch} of chunk {chunk} finds none of {self._limits.counts[chunk]} slots free: they "
                f"are held by microbatches {_listed(self._holders(chunk))}, and the schedule has no more in flight; "
                "--cuda-graph-impl none runs it without slots"
            )
        self.shortages += 1
        return None

    def give_back(self, chunk: int, microbatch: int) -> int:
        """Free the slot of a microbatch whose last pass was launched. Raises TaskOrderError if it has none."""
        if (chunk, microbatch) not in self._in_flight:
            raise TaskOrderError(f"microbatch {microbatch} of chunk {chunk} gives back a slot that it does not hold")
        slot = self._in_flight.pop((chunk, microbatch))
        self._free[chunk].append(slot)
        return slot

    def end_step(self) -> None:
        """End the step. Raises TaskOrderError if a slot is held."""
        if self._in_flight:
            chunk, microbatch = min(self._in_flight)
            raise TaskOrderError(
                f"the step ends before the last pass of microbatch {microbatch} of chunk {chunk}, which holds slot "
                f"{self._in_flight[chunk, microbatch]}"
            )

    def _holders(self, chunk: int) -> Sequence[int]:
        return sorted(microbatch for holder, microbatch in self._in_flight if holder == chunk)


def _listed(microbatches: Sequence[int]) -> str:
    return ", ".join(map(str, microbatches)) or "none"
