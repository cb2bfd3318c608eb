"""Progress of one rank through the tasks of a step."""

from collections import deque

from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind


class RankProgress:
    """Which tasks of a step a rank has run and which it may run now; knows no time and no order.

    Backward and weight tasks of a chunk run in the order of their microbatches, so that every sum of gradients has
    the same order in each schedule.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        num_microbatches: int,
        *,
        split: bool,
        weights: tuple[int, ...] | None = None,
    ) -> None:
        """Begin a step.

        Args:
            placement: stages of the model.
            rank: pipeline rank whose progress this is.
            num_microbatches: microbatches of the step.
            split: whether weight gradients are tasks of their own.
            weights: what the activations of each chunk hold, in bytes or any unit; without them 1 for each chunk.
        """
        self.placement = placement
        self.rank = rank
        self.split = split
        self.weights = weights or (1,) * placement.chunks
        self.ready: set[Task] = set()
        """Forward and backward tasks that have their input and may run now."""
        self.pending_weights: deque[Task] = deque()
        """Weight tasks that may run, in the order of their backward tasks."""
        self.done: set[Task] = set()
        self.activations = 0
        """Activations kept: of forward tasks whose backward task, or weight task if split, has not run."""
        self.in_flight = 0
        """Activations of forward tasks whose backward task has not run."""
        self.in_flight_by_chunk = [0] * placement.chunks
        """Microbatches of each chunk whose backward task has not run after their forward task."""
        self.pending_by_chunk = [0] * placement.chunks
        """Microbatches of each chunk whose weight task has not run after their backward task."""
        self.remaining = (3 if split else 2) * num_microbatches * placement.chunks
        self.oldest = 0
        """First microbatch with a task that has not run."""
        self._tasks_left = [self.remaining // num_microbatches] * num_microbatches
        self._next_backward = [0] * placement.chunks
        self._early_gradients: set[Task] = set()
        for chunk in range(placement.chunks):
            if placement.stage(rank, chunk) == 0:
                self.ready |= {Task.forward(microbatch, chunk) for microbatch in range(num_microbatches)}

    def receive(self, task: Task) -> None:
        """Note that the input of this task has arrived from another rank or another chunk."""
        if task.kind is TaskKind.FORWARD:
            self.ready.add(task)
            return
        self._early_gradients.add(task)
        self._admit_backward(task.chunk)

    def run(self, task: Task) -> Task | None:
        """Note that this task runs. Returns the task of this rank that takes its output, if it is one of this rank."""
        self.done.add(task)
        self.remaining -= 1
        self._tasks_left[task.microbatch] -= 1
        while self.oldest < len(self._tasks_left) and not self._tasks_left[self.oldest]:
            self.oldest += 1
        weight = self.weights[task.chunk]
        if task.kind is TaskKind.WEIGHT:
            self.pending_weights.remove(task)
            self.pending_by_chunk[task.chunk] -= 1
            self.activations -= weight
            return None
        self.ready.remove(task)
        if task.kind is TaskKind.FORWARD:
            self.activations += weight
            self.in_flight += weight
            self.in_flight_by_chunk[task.chunk] += 1
        else:
            self._next_backward[task.chunk] += 1
            self._admit_backward(task.chunk)
            self.in_flight -= weight
            self.in_flight_by_chunk[task.chunk] -= 1
            if self.split:
                self.pending_by_chunk[task.chunk] += 1
                self.pending_weights.append(Task.weight(task.microbatch, task.chunk))
            else:
                self.activations -= weight
        following = self.placement.next_task(self.rank, task)
        return following.task if following is not None and following.rank == self.rank else None

    def _admit_backward(self, chunk: int) -> None:
        task = Task.backward(self._next_backward[chunk], chunk)
        if task in self._early_gradients:
            self._early_gradients.remove(task)
            self.ready.add(task)
