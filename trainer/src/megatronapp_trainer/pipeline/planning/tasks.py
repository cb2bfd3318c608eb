"""Tasks of a training step and the stages that they belong to."""

import dataclasses
import enum
from typing import NamedTuple, Self


class TaskKind(enum.StrEnum):
    """Part of the work on one microbatch in one model chunk."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradient of the chunk's input; without a split backward, gradients of its weights, too."""
    WEIGHT = "W"
    """Gradients of the weights, with a split backward."""


class Task(NamedTuple):
    """One task of a rank in one step."""

    kind: TaskKind
    microbatch: int
    chunk: int

    @classmethod
    def forward(cls, microbatch: int, chunk: int) -> Self:
        """Return a forward task."""
        return cls(TaskKind.FORWARD, microbatch, chunk)

    @classmethod
    def backward(cls, microbatch: int, chunk: int) -> Self:
        """Return a backward task."""
        return cls(TaskKind.BACKWARD, microbatch, chunk)

    @classmethod
    def weight(cls, microbatch: int, chunk: int) -> Self:
        """Return a task of weight gradients."""
        return cls(TaskKind.WEIGHT, microbatch, chunk)

    def pack(self, step: int = 0) -> int:
        """Return the task as a number of 64 bits that `unpack` reads; `step` only distinguishes equal tasks."""
        kind = tuple(TaskKind).index(self.kind)
        return (step % (1 << 24)) << 40 | kind << 38 | self.chunk << 30 | self.microbatch

    @classmethod
    def unpack(cls, number: int) -> Self:
        """Return the task that `pack` made a number of."""
        kind = tuple(TaskKind)[number >> 38 & 3]
        return cls(kind, number & (1 << 30) - 1, number >> 30 & 0xFF)

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}.{self.chunk}"


class RankTask(NamedTuple):
    """A task and the pipeline rank that runs it."""

    rank: int
    task: Task


class Shape(enum.StrEnum):
    """How the stages of a model are spread over pipeline ranks that hold several chunks."""

    LOOP = "loop"
    """Each pass over the model runs on the ranks in order: rank r holds the stages r, r + P, r + 2P, ..."""
    VEE = "vee"
    """The second chunks run backwards: rank r holds the stages r and 2P - 1 - r, so that rank 0 has both ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Stages of a model on pipeline ranks."""

    ranks: int
    chunks: int = 1
    """Model chunks of each rank."""
    shape: Shape = Shape.LOOP

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(f"a pipeline has at least one rank and one chunk, not {self.ranks} and {self.chunks}")
        if self.shape is Shape.VEE and self.chunks != 2:
            raise ValueError(f"a vee has two chunks for each rank, not {self.chunks}")

    @property
    def stages(self) -> int:
        """Return the number of stages of the whole model."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that a rank's chunk is."""
        if self.shape is Shape.VEE and chunk == 1:
            return 2 * self.ranks - 1 - rank
        return chunk * self.ranks + rank

    def holder(self, stage: int) -> tuple[int, int]:
        """Return (rank, chunk) of a stage."""
        chunk, place = divmod(stage, self.ranks)
        if self.shape is Shape.VEE and chunk == 1:
            return self.ranks - 1 - place, chunk
        return place, chunk

    def next_task(self, rank: int, task: Task) -> RankTask | None:
        """Return the task that takes the output of `task` as its input; None for the end of a microbatch's path.

        The path of a microbatch is the forward tasks of all stages in order, then their backward tasks in reverse.
        """
        stage = self.stage(rank, task.chunk)
        if task.kind is TaskKind.WEIGHT:
            return None
        if task.kind is TaskKind.BACKWARD:
            if stage == 0:
                return None
            before, chunk = self.holder(stage - 1)
            return RankTask(before, Task.backward(task.microbatch, chunk))
        if stage == self.stages - 1:
            return RankTask(rank, Task.backward(task.microbatch, task.chunk))
        after, chunk = self.holder(stage + 1)
        return RankTask(after, Task.forward(task.microbatch, chunk))

    def previous_task(self, rank: int, task: Task) -> RankTask | None:
        """Return the task whose output is the input of `task`; None for what reads its input from the data.

        The input of a weight task is its own backward task.
        """
        stage = self.stage(rank, task.chunk)
        if task.kind is TaskKind.WEIGHT:
            return RankTask(rank, Task.backward(task.microbatch, task.chunk))
        if task.kind is TaskKind.FORWARD:
            if stage == 0:
                return None
            before, chunk = self.holder(stage - 1)
            return RankTask(before, Task.forward(task.microbatch, chunk))
        if stage == self.stages - 1:
            return RankTask(rank, Task.forward(task.microbatch, task.chunk))
        after, chunk = self.holder(stage + 1)
        return RankTask(after, Task.backward(task.microbatch, chunk))
