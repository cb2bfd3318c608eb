"""Microbatches: read once, shared within the tensor group, handed to each model chunk in order.

B microbatch, S sequence.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypedDict

import torch
import torch.distributed as dist

from megatronapp_common.trace import Kind
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device import Device
from megatronapp_trainer.layout import Layout
from megatronapp_trainer.observe import StepObserver


class Batch(TypedDict):
    """One microbatch of this rank's replica."""

    tokens: torch.Tensor
    """int64 [B, S]"""
    labels: torch.Tensor
    """int64 [B, S]"""
    loss_mask: torch.Tensor
    """float32 [B, S], 1 where the loss counts"""
    position_ids: torch.Tensor
    """int64 [B, S]"""
    attention_mask: torch.Tensor | None
    """bool [B, 1, S, S], true where not to look; None: plain causal"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataIterators:
    """Endless iterators of microbatches on the CPU; None where a split holds nothing."""

    train: Iterator[Batch]
    valid: Iterator[Batch] | None
    test: Iterator[Batch] | None


class BatchSource:
    """Gives this rank's next microbatch on its device; ranks of a tensor group receive it from the first of them."""

    def __init__(self, config: TrainerConfig, layout: Layout, device: Device) -> None:
        self._config = config
        self._layout = layout
        self._device = device
        size = (config.training.micro_batch_size, config.model.seq_length)
        self._causal_positions = torch.arange(size[1], device=device.torch_device).expand(size)
        self._planes = 4 if config.data.reset_position_ids else 3

    def read(self, iterator: Iterator[Batch]) -> Batch:
        """The next microbatch of this iterator; collective over the tensor group."""
        batch = next(iterator) if self._layout.tensor_rank == 0 else None
        planes = self._shared(None if batch is None else self._packed(batch), self._planes)
        mask = None
        if self._config.data.reset_attention_mask:
            mask = self._shared_mask(None if batch is None else batch["attention_mask"])
        return {
            "tokens": planes[0],
            "labels": planes[1],
            "loss_mask": planes[2].float(),
            "position_ids": planes[3] if self._planes == 4 else self._causal_positions,
            "attention_mask": mask,
        }

    def _packed(self, batch: Batch) -> torch.Tensor:
        """The planes that travel, int64 [planes, B, S]; a loss mask holds only 0 and 1."""
        planes = [batch["tokens"], batch["labels"], batch["loss_mask"].long()]
        if self._planes == 4:
            planes.append(batch["position_ids"])
        return torch.stack(planes)

    def _shared(self, packed: torch.Tensor | None, planes: int) -> torch.Tensor:
        shape = (planes, self._config.training.micro_batch_size, self._config.model.seq_length)
        return self._broadcast(packed, shape, torch.int64)

    def _shared_mask(self, mask: torch.Tensor | None) -> torch.Tensor:
        length = self._config.model.seq_length
        shape = (self._config.training.micro_batch_size, 1, length, length)
        return self._broadcast(None if mask is None else mask.to(torch.uint8), shape, torch.uint8).bool()

    def _broadcast(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        here = (
            torch.empty(shape, dtype=dtype, device=self._device.torch_device)
            if tensor is None
            else self._device.to_device(tensor)
        )
        if self._layout.tensor_size > 1:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group()
            dist.broadcast(here, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
        return here


class StepFeed:
    """Hands every chunk the microbatches of a step in order, and reads each microbatch once.

    Under the interleaved schedule several chunks may need the same microbatch at different times.
    """

    def __init__(
        self,
        source: BatchSource,
        iterator: Iterator[Batch],
        *,
        needed_by: frozenset[int],
        observer: StepObserver | None,
    ) -> None:
        self._source = source
        self._iterator = iterator
        self._needed_by = needed_by
        self._observer = observer
        self._held: dict[int, tuple[Batch, int]] = {}
        self._read = 0

    def take(self, chunk: int, microbatch: int) -> Batch | None:
        """This chunk's microbatch, or None if the chunk needs no data."""
        if chunk not in self._needed_by:
            return None
        if self._observer is not None:
            self._observer.begin(Kind.DATA, chunk, microbatch)
        while self._read <= microbatch:
            self._held[self._read] = (self._source.read(self._iterator), len(self._needed_by))
            self._read += 1
        if self._observer is not None:
            self._observer.end(Kind.DATA)
        return self._release(microbatch)

    def _release(self, microbatch: int) -> Batch:
        batch, users = self._held.pop(microbatch)
        if users > 1:
            self._held[microbatch] = (batch, users - 1)
        return batch


class ChunkFeed:
    """What the schedules pass around as a chunk's data iterator."""

    def __init__(self, feed: StepFeed, chunk: int) -> None:
        self.chunk = chunk
        self.microbatch = -1
        self._feed = feed

    def next(self) -> Batch | None:
        """The chunk's next microbatch."""
        self.microbatch += 1
        return self._feed.take(self.chunk, self.microbatch)


def chunks_that_need_data(config: TrainerConfig, layout: Layout) -> frozenset[int]:
    """Chunks of this rank that read tokens (first), labels (last) or an attention mask (all)."""
    if config.data.reset_attention_mask:
        return frozenset(range(layout.virtual_size))
    first = {0} if layout.is_first_stage else set()
    last = {layout.virtual_size - 1} if layout.is_last_stage else set()
    return frozenset(first | last)
