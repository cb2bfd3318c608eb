"""Choice of the plan and of the memory beyond it, by simulating a step with measured times."""

import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence

from megatronapp_trainer.pipeline.planning.orders import Order, interleaved, peak_in_flight, with_weights
from megatronapp_trainer.pipeline.planning.policies import PlanGuided, Policy, Static
from megatronapp_trainer.pipeline.planning.simulator import simulate
from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind

HISTORIES = 4
"""Simulated steps of each candidate, with transfers drawn from the measured ones."""
SPARES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Chunks of memory beyond the plan's own need that are tried; more than some per rank fill no further waits."""
GOOD_ENOUGH = 1.005
"""Factor of the shortest step below which the candidate with the least memory is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTimes:
    """Times of the tasks and transfers of some steps."""

    task_seconds: Mapping[tuple[int, TaskKind, int], float]
    """Median by (rank, kind, chunk); B and W apart if backward passes are split."""
    transfer_seconds: Sequence[float]
    """Copy of each output to the rank that takes it; at least one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Plan of all ranks and the chunks' activations that each may keep beyond the plan's own need."""

    weight_delay: int | None
    """Backward tasks that a planned weight task waits for on rank r, times r; None: weight tasks only fill waits."""
    spare_chunks: int

    def __str__(self) -> str:
        plan = "weight gradients fill waits" if self.weight_delay is None else "weight gradients at planned places"
        return f"order of megatron-core, {plan}, {self.spare_chunks} chunks of memory to spare"

    def order(self, placement: Placement, num_microbatches: int, rank: int) -> Order:
        """Return the plan of a rank."""
        order = interleaved(placement, num_microbatches, rank)
        return order if self.weight_delay is None else with_weights(order, self.weight_delay * rank)

    def cap(self, placement: Placement, num_microbatches: int, rank: int) -> int:
        """Return the most chunks whose activations a rank may keep."""
        needed = peak_in_flight(interleaved(placement, num_microbatches, rank), (1,) * placement.chunks)
        return needed + self.spare_chunks

    def policy(self, placement: Placement, num_microbatches: int, rank: int) -> Policy:
        """Return the policy of a rank for one step."""
        return PlanGuided(
            self.order(placement, num_microbatches, rank), cap=self.cap(placement, num_microbatches, rank)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """A candidate and what the simulation expects of it."""

    candidate: Candidate
    seconds: float
    """Expected duration of the tasks of a step."""
    static_seconds: float
    """Duration under the static order with whole backward passes."""
    bubble: float
    """Expected share of the step in which a rank runs no task; mean over the ranks."""


def choose_candidate(
    placement: Placement, num_microbatches: int, times: MeasuredTimes, *, most_spare: int, seed: int = 0
) -> PlanChoice:
    """Return the candidate with the shortest simulated step; of nearly equal ones that with the least memory.

    Args:
        placement: stages of the model.
        num_microbatches: microbatches of a step.
        times: measured in earlier steps with split backward passes.
        most_spare: chunks beyond the plan's need that the memory allows on every rank.
        seed: of the draws from the measured transfers; equal on all ranks that must choose alike.
    """
    spares = sorted({0, most_spare, *(spare for spare in SPARES if spare < most_spare)})
    candidates = [
        Candidate(weight_delay=delay, spare_chunks=spare)
        for spare in spares
        for delay in (None, *((1,) if placement.chunks == 1 else ()))
    ]
    expected = []
    for candidate in candidates:
        runs = [_simulated(placement, num_microbatches, times, candidate, f"{seed} {i}") for i in range(HISTORIES)]
        expected.append((statistics.mean(run[0] for run in runs), statistics.mean(run[1] for run in runs)))
    shortest = min(seconds for seconds, _ in expected)
    candidate, (seconds, bubble) = next(
        pair for pair in zip(candidates, expected, strict=True) if pair[1][0] <= shortest * GOOD_ENOUGH
    )
    static = [_simulated(placement, num_microbatches, times, None, f"{seed} {i}")[0] for i in range(HISTORIES)]
    return PlanChoice(candidate=candidate, seconds=seconds, static_seconds=statistics.mean(static), bubble=bubble)


def _simulated(
    placement: Placement, num_microbatches: int, times: MeasuredTimes, candidate: Candidate | None, history: str
) -> tuple[float, float]:
    """Return duration and mean bubble of a simulated step; without a candidate, of the static order without split."""
    draw = random.Random(history)

    def task_seconds(rank: int, task: Task) -> float:
        seconds = times.task_seconds[rank, task.kind, task.chunk]
        if candidate is None and task.kind is TaskKind.BACKWARD:
            seconds += times.task_seconds[rank, TaskKind.WEIGHT, task.chunk]
        return seconds

    policies: list[Policy] = [
        Static(interleaved(placement, num_microbatches, rank))
        if candidate is None
        else candidate.policy(placement, num_microbatches, rank)
        for rank in range(placement.ranks)
    ]
    simulation = simulate(
        placement,
        num_microbatches,
        policies,
        split=candidate is not None,
        task_seconds=task_seconds,
        transfer_seconds=lambda _rank, _task: draw.choice(times.transfer_seconds),
    )
    return simulation.seconds, statistics.mean(simulation.bubble(rank) for rank in range(placement.ranks))
