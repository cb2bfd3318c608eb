"""Static orders of the tasks of a step.

P pipeline ranks, V chunks of each rank, M microbatches of a step.
"""

import itertools
from collections import deque

from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, Task, TaskKind

Order = tuple[Task, ...]
"""All tasks of one rank in one step."""


def interleaved(placement: Placement, num_microbatches: int, rank: int) -> Order:
    """Return the order of megatron-core's 1F1B (one chunk) and interleaved 1F1B (several), without weight tasks.

    Forward passes run in groups of P microbatches: a group through the first chunk, then through the second, and so
    on. After the warm-up each forward pass is followed by a backward pass (arXiv 2104.04473).

    Raises:
        ValueError: several chunks, and a last group of less than P microbatches, whose ranks would wait for each other.
    """
    if placement.shape is not Shape.LOOP:
        raise ValueError("an interleaved order needs stages in a loop")
    if placement.chunks > 1 and num_microbatches % placement.ranks:
        raise ValueError(
            f"{num_microbatches} microbatches are no multiple of the {placement.ranks} ranks of an interleaved order"
        )
    chunks = range(placement.chunks)
    path = [
        (microbatch, chunk)
        for first in range(0, num_microbatches, placement.ranks)
        for chunk in chunks
        for microbatch in range(first, min(first + placement.ranks, num_microbatches))
    ]
    forwards = [Task.forward(microbatch, chunk) for microbatch, chunk in path]
    backwards = [Task.backward(microbatch, placement.chunks - 1 - chunk) for microbatch, chunk in path]
    warm_up = placement.ranks - rank - 1
    if placement.chunks > 1:
        warm_up = 2 * warm_up + (placement.chunks - 1) * placement.ranks
    warm_up = min(warm_up, len(path))
    steady = [task for pair in zip(forwards[warm_up:], backwards, strict=False) for task in pair]
    return (*forwards[:warm_up], *steady, *backwards[len(path) - warm_up :])


def with_weights(order: Order, delay: int = 0) -> Order:
    """Insert the weight tasks into an order: each runs after its backward task and `delay` further ones."""
    tasks: list[Task] = []
    pending: deque[Task] = deque()
    for task in order:
        tasks.append(task)
        if task.kind is TaskKind.BACKWARD:
            pending.append(Task.weight(task.microbatch, task.chunk))
            if len(pending) > delay:
                tasks.append(pending.popleft())
    return (*tasks, *pending)


def zero_bubble_h1(placement: Placement, num_microbatches: int, rank: int) -> Order:
    """Return the order ZB-H1 (arXiv 2401.10241): 1F1B whose weight tasks wait, on rank r for r backward tasks.

    Every rank holds the activations of at most P microbatches, as rank 0 does under 1F1B.
    """
    if placement.chunks != 1:
        raise ValueError(f"ZB-H1 has one chunk for each rank, not {placement.chunks}")
    return with_weights(interleaved(placement, num_microbatches, rank), delay=rank)


def zero_bubble_v(placement: Placement, num_microbatches: int, rank: int) -> Order:
    """Return the order ZB-V (arXiv 2405.15362), for stages in a vee.

    With tasks of equal length no rank waits between its first and its last task, and every rank holds at most the 2P
    chunks' activations that rank 0 holds under 1F1B.
    """
    if placement.shape is not Shape.VEE:
        raise ValueError("ZB-V needs stages in a vee")
    tasks = _VeeTasks(num_microbatches)
    after = placement.ranks - rank
    for _ in range(2 * after - 1):
        tasks.forward(0)
    for _ in range(rank):
        tasks.forward(1)
        tasks.forward(0)
    for _ in range(after):
        tasks.forward(1)
        tasks.backward(1)
        tasks.weight(1)
    while tasks.has_forwards:
        for chunk in (0, 1):
            tasks.forward(chunk)
            tasks.backward(chunk)
            tasks.weight(chunk)
    for _ in range(rank):
        tasks.backward(0)
        tasks.backward(1)
    for _ in range(after):
        tasks.backward(0)
        tasks.weight(0)
    return tasks.finished()


class _VeeTasks:
    """Tasks of a rank in a vee, in the order of their microbatches; tasks that do not exist are skipped."""

    def __init__(self, num_microbatches: int) -> None:
        self._limit = num_microbatches
        self._forwards, self._backwards, self._weights = [0, 0], [0, 0], [0, 0]
        self._tasks: list[Task] = []

    @property
    def has_forwards(self) -> bool:
        return min(self._forwards) < self._limit

    def forward(self, chunk: int) -> None:
        if self._forwards[chunk] < self._limit:
            self._tasks.append(Task.forward(self._forwards[chunk], chunk))
            self._forwards[chunk] += 1

    def backward(self, chunk: int) -> None:
        if self._backwards[chunk] < self._forwards[chunk]:
            self._tasks.append(Task.backward(self._backwards[chunk], chunk))
            self._backwards[chunk] += 1

    def weight(self, chunk: int) -> None:
        if self._weights[chunk] < self._backwards[chunk]:
            self._tasks.append(Task.weight(self._weights[chunk], chunk))
            self._weights[chunk] += 1

    def finished(self) -> Order:
        for task in (self.backward, self.weight):
            for chunk in (1, 0):
                for _ in range(self._limit):
                    task(chunk)
        return tuple(self._tasks)


def static_order(placement: Placement, num_microbatches: int, rank: int) -> Order:
    """Return the order of a placement without weight tasks: in a loop that of megatron-core, in a vee that of ZB-V."""
    if placement.shape is Shape.LOOP:
        return interleaved(placement, num_microbatches, rank)
    order = zero_bubble_v(placement, num_microbatches, rank)
    return tuple(task for task in order if task.kind is not TaskKind.WEIGHT)


def zero_bubble(placement: Placement, num_microbatches: int, rank: int) -> Order:
    """Return the same order with weight tasks at planned places: ZB-V in a vee, ZB-H1 with one chunk on each rank.

    In a loop with several chunks they wait as in ZB-H1, on rank r for r backward tasks.
    """
    if placement.shape is Shape.VEE:
        return zero_bubble_v(placement, num_microbatches, rank)
    if placement.chunks == 1:
        return zero_bubble_h1(placement, num_microbatches, rank)
    return with_weights(interleaved(placement, num_microbatches, rank), delay=rank)


def forward_vee(placement: Placement, num_microbatches: int, rank: int) -> Order:
    """Return the forward tasks of a rank in a vee in an order in which, with tasks of equal length, no rank waits.

    A microbatch begins every second task; its stages alternate between even and odd places of each rank's order.
    """
    tasks = (Task.forward(microbatch, chunk) for microbatch in range(num_microbatches) for chunk in (0, 1))
    return tuple(sorted(tasks, key=lambda task: 2 * task.microbatch + placement.stage(rank, task.chunk)))


def peak_activations(order: Order) -> int:
    """Return the most chunks of which an order keeps activations: until their weight tasks, pending ones included."""
    counts = itertools.accumulate((task.kind is TaskKind.FORWARD) - (task.kind is TaskKind.WEIGHT) for task in order)
    return max(counts)


def peak_in_flight(order: Order, weights: tuple[int, ...]) -> int:
    """Return the most that forward tasks hold until their backward tasks; `weights` is what each chunk holds."""
    used = peak = 0
    for task in order:
        if task.kind is TaskKind.FORWARD:
            used += weights[task.chunk]
            peak = max(peak, used)
        elif task.kind is TaskKind.BACKWARD:
            used -= weights[task.chunk]
    return peak


def needed_chunks(placement: Placement, num_microbatches: int) -> int:
    """Return the most chunks of which a rank keeps activations until their backward tasks in the static order.

    That is the first rank in a loop and the last one in a vee.
    """
    rank = 0 if placement.shape is Shape.LOOP else placement.ranks - 1
    return peak_in_flight(static_order(placement, num_microbatches, rank), (1,) * placement.chunks)
