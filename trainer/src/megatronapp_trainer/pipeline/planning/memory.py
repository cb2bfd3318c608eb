"""Memory that the tasks of a rank keep between each other, and limits of it."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Self

from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.tasks import Task, TaskKind


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkMemory:
    """Memory that the tasks of one chunk keep for each microbatch, in bytes or any other unit."""

    activations: int
    """From the forward task to the end of the backward task."""
    operands: int
    """From the end of the backward task to the weight task: operands of the weight gradients."""

    @classmethod
    def largest(cls, measured: Sequence[Self]) -> Self:
        """Return the most of several measurements, of each of the two."""
        return cls(max(chunk.activations for chunk in measured), max(chunk.operands for chunk in measured))


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Most that the tasks of a rank may keep at a time."""

    most: int
    chunks: tuple[ChunkMemory, ...]

    def added(self, task: Task) -> int:
        """Return by how much more is kept after this task than before it."""
        chunk = self.chunks[task.chunk]
        if task.kind is TaskKind.FORWARD:
            return chunk.activations
        return chunk.operands - chunk.activations if task.kind is TaskKind.BACKWARD else -chunk.operands

    def used(self, progress: RankProgress) -> int:
        """Return what a rank keeps now."""
        pending = zip(self.chunks, progress.pending_by_chunk, strict=True)
        return self.in_flight(progress) + sum(chunk.operands * count for chunk, count in pending)

    def in_flight(self, progress: RankProgress) -> int:
        """Return what a rank would keep now without pending weight tasks."""
        return sum(
            chunk.activations * count for chunk, count in zip(self.chunks, progress.in_flight_by_chunk, strict=True)
        )

    def peak(self, order: Sequence[Task]) -> int:
        """Return the most that an order keeps if each weight task runs right after its backward task."""
        used = peak = 0
        for task in order:
            if task.kind is TaskKind.WEIGHT:
                continue
            peak = max(peak, used + self.added(task))
            activations = self.chunks[task.chunk].activations
            used += activations if task.kind is TaskKind.FORWARD else -activations
        return peak

    def allows_order(self, order: Sequence[Task]) -> bool:
        """Return whether a rank may run all tasks of an order, weight tasks included, in that order."""
        return max(itertools.accumulate(map(self.added, order))) <= self.most
