"""Simulation of a step: ranks that run tasks by their policies, and transfers between them."""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatronapp_trainer.pipeline.planning.orders import Order
from megatronapp_trainer.pipeline.planning.policies import Policy
from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.tasks import Placement, RankTask, Task, TaskKind

Duration = Callable[[int, Task], float]
"""Seconds of a rank's task, or of the transfer of its output; called once for each."""


class TaskSpan(NamedTuple):
    """When a task ran, in seconds from the beginning of the step."""

    task: Task
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulated step."""

    spans: tuple[tuple[TaskSpan, ...], ...]
    """Spans of each rank, in the order of its tasks."""
    peaks: tuple[int, ...]
    """Most activations that each rank kept at a time, in the unit of the weights."""

    @property
    def seconds(self) -> float:
        """Return the duration of the step."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def orders(self) -> tuple[Order, ...]:
        """Return the order of each rank's tasks."""
        return tuple(tuple(span.task for span in spans) for spans in self.spans)

    def bubble(self, rank: int) -> float:
        """Return the share of the step in which this rank ran no task."""
        return 1 - sum(span.end - span.start for span in self.spans[rank]) / self.seconds

    @property
    def mean_bubble(self) -> float:
        """Return the mean of that share over the ranks."""
        return sum(map(self.bubble, range(len(self.spans)))) / len(self.spans)


class DeadlockError(Exception):
    """The policies left tasks that none of them would run."""


def simulate(
    placement: Placement,
    num_microbatches: int,
    policies: Sequence[Policy],
    *,
    split: bool,
    task_seconds: Duration,
    transfer_seconds: Duration,
    weights: tuple[int, ...] | None = None,
) -> Simulation:
    """Run one step of all pipeline ranks with the policies of the product.

    The transfers of one kind from one rank follow each other, as copies on one stream do.

    Raises:
        DeadlockError: tasks are left that no policy runs.
    """
    ranks = [
        RankProgress(placement, rank, num_microbatches, split=split, weights=weights) for rank in range(placement.ranks)
    ]
    return _Step(placement, ranks, policies, task_seconds, transfer_seconds).run()


class _Step:
    def __init__(
        self,
        placement: Placement,
        ranks: Sequence[RankProgress],
        policies: Sequence[Policy],
        task_seconds: Duration,
        transfer_seconds: Duration,
    ) -> None:
        self._placement = placement
        self._ranks = ranks
        self._policies = policies
        self._task_seconds = task_seconds
        self._transfer_seconds = transfer_seconds
        self._spans: list[list[TaskSpan]] = [[] for _ in self._ranks]
        self._peaks = [0] * placement.ranks
        self._busy = [False] * placement.ranks
        self._channel_free: dict[tuple[int, TaskKind], float] = {}
        self._events: list[tuple[float, int, int, Task | None]] = []
        """Time, a number that keeps simultaneous events in order, the rank, and the task whose input arrives there;
        None where the rank's own task ends."""
        self._numbers = itertools.count()

    def run(self) -> Simulation:
        for rank in range(len(self._ranks)):
            self._start_next(rank, 0.0)
        while self._events:
            now, _, rank, arrived = heapq.heappop(self._events)
            if arrived is None:
                self._busy[rank] = False
                self._deliver(rank, self._spans[rank][-1])
            else:
                self._ranks[rank].receive(arrived)
            self._start_next(rank, now)
        left = {rank: progress.remaining for rank, progress in enumerate(self._ranks) if progress.remaining}
        if left:
            raise DeadlockError(f"tasks that no policy runs, by rank: {left}")
        return Simulation(tuple(map(tuple, self._spans)), tuple(self._peaks))

    def _start_next(self, rank: int, now: float) -> None:
        progress = self._ranks[rank]
        if self._busy[rank] or not progress.remaining:
            return
        task = self._policies[rank].choose(progress)
        if task is None:
            return
        progress.run(task)
        self._peaks[rank] = max(self._peaks[rank], progress.activations)
        self._busy[rank] = True
        end = now + self._task_seconds(rank, task)
        self._spans[rank].append(TaskSpan(task, now, end))
        self._schedule(end, rank, None)

    def _deliver(self, rank: int, span: TaskSpan) -> None:
        """Send the output of a task that has ended to the task that takes it."""
        target: RankTask | None = self._placement.next_task(rank, span.task)
        if target is None:
            return
        if target.rank == rank:
            self._ranks[rank].receive(target.task)
            return
        channel = (rank, span.task.kind)
        begun = max(span.end, self._channel_free.get(channel, 0.0))
        end = begun + self._transfer_seconds(rank, span.task)
        self._channel_free[channel] = end
        self._schedule(end, target.rank, target.task)

    def _schedule(self, time: float, rank: int, arrived: Task | None) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), rank, arrived))
