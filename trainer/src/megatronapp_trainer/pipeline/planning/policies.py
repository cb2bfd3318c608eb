"""Policies: which task a rank runs next.

A policy of one rank and one step sees only the rank's own progress. It never deadlocks: see `PlanGuided` and `Greedy`.
"""

from typing import Protocol

from megatronapp_trainer.pipeline.planning.memory import ChunkMemory, MemoryLimit
from megatronapp_trainer.pipeline.planning.orders import Order
from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.tasks import Task, TaskKind


class Policy(Protocol):
    """Chooses the tasks of one rank in one step."""

    @property
    def early(self) -> bool:
        """Return whether the task that was chosen last runs before its turn in a plan."""

    @property
    def is_fixed(self) -> bool:
        """Return whether the rank runs its planned task next, however late that is."""

    def planned(self, progress: RankProgress) -> Task | None:
        """Return the task whose turn it is in the plan; None without a plan, or where it is not known yet."""

    def choose(self, progress: RankProgress) -> Task | None:
        """Return the task to run now, or None to wait for an input."""


class Static:
    """Runs an order as it is, and waits for the input of each task."""

    early = False
    is_fixed = True

    def __init__(self, order: Order) -> None:
        self._order = order
        self._place = 0

    def planned(self, progress: RankProgress) -> Task | None:
        """Return the next task of the order."""
        return self._order[self._place]

    def choose(self, progress: RankProgress) -> Task | None:
        """Return the next task of the order once its input is there."""
        task = self._order[self._place]
        if task not in progress.ready and task not in progress.pending_weights:
            return None
        self._place += 1
        return task


class PlanGuided:
    """Follows an order, and fills the wait for an input with other tasks, earliest in the order first.

    While the planned task has no input, the rank runs a ready backward task, a ready forward task, or a weight task.
    A task may run early only if the rest of the plan still fits under the cap, so that the cap holds always: a task
    for which there is no room waits for weight tasks alone. The planned task is never refused otherwise, so that a set
    of plans without deadlock stays without: of all tasks that have not run, one that is first in the plan of its rank
    has its input.
    """

    is_fixed = False

    def __init__(
        self, order: Order, *, cap: int, weights: tuple[int, ...] | None = None, memory: MemoryLimit | None = None
    ) -> None:
        """Take the order of a rank.

        Args:
            order: forward and backward tasks; weight tasks where they are to run at a planned place.
            cap: activations that the rank may hold, until their weight task, in the unit of `weights`.
            weights: what the activations of each chunk hold; without them 1 for each chunk.
            memory: limit in another unit that holds as well.

        Raises:
            ValueError: the order itself needs more than the cap or the limit.
        """
        weights = weights or (1,) * (1 + max(task.chunk for task in order))
        limit = MemoryLimit(cap, tuple(ChunkMemory(weight, weight) for weight in weights))
        self._limits = (limit,) if memory is None else (limit, memory)
        for limit in self._limits:
            if limit.peak(order) > limit.most:
                raise ValueError(f"the plan holds {limit.peak(order)} at its peak, more than the cap of {limit.most}")
        self._order = order
        self._position = {task: place for place, task in enumerate(order)}
        self._place = 0
        self.deviations = 0
        """Forward and backward tasks that ran before their turn."""
        self.early = False

    def planned(self, progress: RankProgress) -> Task | None:
        """Return the first task of the plan that has not run; after the plan, a pending weight task."""
        while self._place < len(self._order) and self._order[self._place] in progress.done:
            self._place += 1
        if self._place < len(self._order):
            return self._order[self._place]
        return progress.pending_weights[0] if progress.pending_weights else None

    def choose(self, progress: RankProgress) -> Task | None:
        """Return the planned task if its input is there, another one meanwhile, or None."""
        planned = self.planned(progress)
        task = self._choice(planned, progress)
        self.early = task != planned and task in self._position
        return task

    def _choice(self, planned: Task | None, progress: RankProgress) -> Task | None:
        if planned is None or planned in progress.pending_weights:
            return planned
        if planned in progress.ready:
            return planned if self._fits(planned, progress) else progress.pending_weights[0]
        for task in self._earliest(progress):
            if self._may_run_early(task, progress):
                if not self._fits(task, progress):
                    return progress.pending_weights[0]
                self.deviations += 1
                return task
        return progress.pending_weights[0] if progress.pending_weights else None

    def _earliest(self, progress: RankProgress) -> list[Task]:
        """Return the ready tasks that are earliest in the plan, one of each kind and chunk, the earliest first.

        Where the first forward task of a chunk does not fit under the cap, no later one of that chunk does.
        """
        earliest: dict[tuple[TaskKind, int], Task] = {}
        for task in progress.ready:
            key = (task.kind, task.chunk)
            if key not in earliest or self._position[task] < self._position[earliest[key]]:
                earliest[key] = task
        return sorted(earliest.values(), key=self._position.__getitem__)

    def _fits(self, task: Task, progress: RankProgress) -> bool:
        """Return whether there is room for what `task` keeps; pending weight tasks can make room."""
        if task.kind is TaskKind.WEIGHT or not progress.pending_weights:
            return True
        return all(limit.used(progress) + limit.added(task) <= limit.most for limit in self._limits)

    def _may_run_early(self, task: Task, progress: RankProgress) -> bool:
        """Return whether the plan has room up to the place of `task` if `task` runs now, and weight tasks as needed.

        A backward task leaves more room to all tasks after it.
        """
        if task.kind is TaskKind.WEIGHT:
            return True
        tasks = [task]
        if task.kind is TaskKind.FORWARD:
            between = self._order[self._place : self._position[task]]
            tasks += [planned for planned in between if planned not in progress.done]
        return all(limit.in_flight(progress) + limit.peak(tasks) <= limit.most for limit in self._limits)


class Greedy:
    """Runs any ready task: backward first, then forward passes of the deepest or of the shallowest chunk.

    Depth first and breadth first, as MegatronApp's dynamic schedule has them. A rank admits microbatches in order, at
    most `admitted` at a time; an admitted one may run all its tasks. So the oldest unfinished microbatch is admitted
    on every rank, and can always continue.
    """

    early = False
    """There is no plan."""
    is_fixed = False

    def __init__(self, *, depth_first: bool, admitted: int) -> None:
        """Take the direction and the number of microbatches that may be in the rank at a time, at least one."""
        if admitted < 1:
            raise ValueError(f"a rank must admit at least one microbatch, not {admitted}")
        self._sign = -1 if depth_first else 1
        self._admitted = admitted

    def planned(self, progress: RankProgress) -> Task | None:
        """Return None, as there is no plan."""
        return None

    def choose(self, progress: RankProgress) -> Task | None:
        """Return a ready backward task, or without one an admitted forward task, a weight task, or None."""
        beyond = progress.oldest + self._admitted
        ready = [task for task in progress.ready if task.kind is TaskKind.BACKWARD or task.microbatch < beyond]
        if ready:
            return min(ready, key=self._urgency)
        return progress.pending_weights[0] if progress.pending_weights else None

    def _urgency(self, task: Task) -> tuple[bool, int, int]:
        backward = task.kind is TaskKind.BACKWARD
        return not backward, -task.chunk if backward else self._sign * task.chunk, task.microbatch
