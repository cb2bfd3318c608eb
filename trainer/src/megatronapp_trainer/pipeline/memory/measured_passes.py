"""Passes of a step that measure what they keep, for a memory cap in bytes."""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatronapp_trainer.pipeline.planning.memory import ChunkMemory
from megatronapp_trainer.pipeline.planning.tasks import Task


class MeasurablePasses(Protocol):
    """Runs single tasks; see `TaskPasses`."""

    def announce(self, task: Task, *, early: bool) -> None:
        """Take the task that runs next."""

    def forward(self, task: Task, received: torch.Tensor | None) -> torch.Tensor:
        """Return the output of the chunk."""

    def backward(self, task: Task, received: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of the chunk's input."""

    def weight(self, task: Task) -> None:
        """Compute the gradients of the chunk's weights."""

    def operand_bytes(self, chunk: int) -> int:
        """Return the bytes that pending weight tasks of a chunk keep."""


class MeasuredPasses:
    """Runs the tasks of a step and measures what each chunk keeps for a microbatch.

    What a forward pass keeps is the memory of all tensors that autograd saves in it, without parameters, and of its
    input. Tensors that several microbatches share count for each of them, so that a measurement is never too small.
    """

    def __init__(self, passes: MeasurablePasses, chunks: list[Any]) -> None:
        """Take the passes of a run, and its chunks, each in megatron-core's DistributedDataParallel."""
        self._passes = passes
        self._parameters = {part.untyped_storage().data_ptr() for chunk in chunks for part in chunk.parameters()}
        self._activations = [0] * len(chunks)
        self._operands = [0] * len(chunks)

    @property
    def measured(self) -> tuple[ChunkMemory, ...]:
        """Return the most that each chunk has kept for a microbatch, in bytes."""
        return tuple(map(ChunkMemory, self._activations, self._operands))

    def announce(self, task: Task, *, early: bool) -> None:
        """Pass the task on."""
        self._passes.announce(task, early=early)

    def forward(self, task: Task, received: torch.Tensor | None) -> torch.Tensor:
        """Run a forward pass."""
        with self._saved_memory() as saved:
            output = self._passes.forward(task, received)
        if received is not None:
            saved[received.untyped_storage().data_ptr()] = received.untyped_storage().nbytes()
        # Of the output, which is freed once it is sent, one number stays for the backward pass, as of the loss.
        total = sum(saved.values()) + output.element_size()
        self._activations[task.chunk] = max(self._activations[task.chunk], total)
        return output

    def backward(self, task: Task, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run a backward pass."""
        before = self._passes.operand_bytes(task.chunk)
        gradient = self._passes.backward(task, received)
        added = self._passes.operand_bytes(task.chunk) - before
        self._operands[task.chunk] = max(self._operands[task.chunk], added)
        return gradient

    def weight(self, task: Task) -> None:
        """Run a weight task."""
        self._passes.weight(task)

    @contextlib.contextmanager
    def _saved_memory(self) -> Iterator[dict[int, int]]:
        """Collect the bytes of each storage that autograd saves within the context, by address."""
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self._parameters:
                return tensor
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # torch: a hook that returns an operation's own output makes a circle of references

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved


def gather_measured(
    own: tuple[ChunkMemory, ...], pipeline_rank: int, pipeline_size: int
) -> list[tuple[ChunkMemory, ...]]:
    """Return the most that any rank of each place in the pipeline has measured; collective over the world."""
    found: list[tuple[int, tuple[ChunkMemory, ...]]] = [(pipeline_rank, own)] * dist.get_world_size()
    dist.all_gather_object(found, (pipeline_rank, own))
    by_place: list[list[tuple[ChunkMemory, ...]]] = [[] for _ in range(pipeline_size)]
    for place, chunks in found:
        by_place[place].append(chunks)
    return [tuple(map(ChunkMemory.largest, zip(*ranks, strict=True))) for ranks in by_place]
