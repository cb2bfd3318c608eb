"""Microbatches: read once, shared within the tensor group, passed to each model chunk in order.

G microbatches that are sent together, P planes, B samples of a microbatch, S sequence.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict

import torch
import torch.distributed as dist

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device import Device
from megatronapp_trainer.hooks.step_observer import StepObserver
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.sequence import part_of_rank

TOGETHER = 8
"""Microbatches that are copied to the device, and sent to the tensor group, at once: each copy and each broadcast costs
the host as much as several kernels of a layer, however small it is.
"""


class HostMicrobatch(TypedDict):
    """One microbatch of this rank's replica, as it is read."""

    tokens: torch.Tensor
    """int64 [B, S]"""
    labels: torch.Tensor
    """int64 [B, S]"""
    loss_mask: torch.Tensor
    """float32 [B, S], 1 where the loss is counted"""
    position_ids: torch.Tensor
    """int64 [B, S], from 0 on in each document with --reset-position-ids or --reset-attention-mask"""
    source: NotRequired[torch.Tensor]
    """int64 [B], number of the corpus, where the loss of each is reported"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ValidationSet:
    """Data of an evaluation: `global_batches` that are read from the iterator each time."""

    name: str
    iterator: Iterator[Any]
    global_batches: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataIterators:
    """Endless iterators of microbatches on the CPU, in the form of the model family; None where a split has no data."""

    train: Iterator[Any]
    valid: Iterator[Any] | None
    """Microbatches of evaluations of --eval-iters global batches; None also where there are `valid_sets`."""
    test: Iterator[Any] | None
    valid_sets: tuple[ValidationSet, ...] = ()
    """Sets with losses of their own, or of another length than --eval-iters."""
    stream_state: Callable[[], str] | None = None
    """Returns where a stream continues after what was taken of `train`; collective. None: samples are numbered."""


class RepeatableBatches:
    """Iterator of microbatches that stores those of some steps on the host, so that they can be read again."""

    def __init__(self, iterator: Iterator[HostMicrobatch]) -> None:
        self._iterator = iterator
        self._step: list[HostMicrobatch] = []
        self._stores = False

    def __iter__(self) -> Iterator[HostMicrobatch]:
        return self

    def __next__(self) -> HostMicrobatch:
        batch = next(self._iterator)
        if self._stores:
            self._step.append(batch)
        return batch

    def begin_step(self, *, stores: bool) -> None:
        """Forget the step before, and store the microbatches of this one or do not."""
        self._step.clear()
        self._stores = stores

    def again(self) -> Iterator[HostMicrobatch]:
        """Return the microbatches of the step that were read."""
        return iter(self._step)


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch of this rank's replica, on its device. S: the tokens of this rank, where ranks share samples."""

    tokens: torch.Tensor
    """int64 [B, S]"""
    labels: torch.Tensor
    """int64 [B, S]"""
    loss_mask: torch.Tensor
    """float32 [B, S], 1 where the loss is counted"""
    loss_tokens: torch.Tensor
    """float32 [], the sum of the loss mask"""
    position_ids: torch.Tensor
    """int64 [B, S]"""
    attention_mask: torch.Tensor | None
    """Bounds of the documents of whole samples, int32 [N + 1] on the host (`models.packed_documents`); or
    bool [B, 1, S, S], true where attention is masked; None: plain causal"""
    sample_tokens: torch.Tensor
    """float32 [], the sum of the loss mask over whole samples"""
    context_size: int
    """Ranks that share the samples."""
    sources: torch.Tensor | None = None
    """float32 [B, N], 1 at the corpus of a sample among N; None: the loss of each is not reported"""


class MicrobatchWork(NamedTuple):
    """Work of a microbatch, as its passes compute it: padding counts where it is computed."""

    tokens: int
    pairs: int = 0
    """Pairs of tokens that attend to each other; 0 where they grow like the tokens."""


class MicrobatchSource(Protocol):
    """Reads the microbatches of a model family; what they hold is between it and the family's `forward` and `loss`."""

    together: int
    """Microbatches to read at once."""
    reading_chunks: frozenset[int]
    """Chunks of this rank that need data."""

    def read(self, iterator: Iterator[Any], count: int) -> list[Any]:
        """Return the next `count` microbatches of this iterator; collective over the tensor group."""

    def work(self, batch: Any) -> MicrobatchWork | None:  # noqa: ANN401 - the family's microbatch
        """Return the work of a microbatch, for traces; None where all have the same shape."""


class BatchSource:
    """Source of this rank's microbatches on its device; the first rank of a tensor group sends them to the others."""

    def __init__(
        self,
        config: TrainerConfig,
        layout: Layout,
        device: Device,
        mask_of_positions: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        sources: int = 0,
    ) -> None:
        """Take the run; `mask_of_positions` turns positions [B, S] within documents into the mask of attention.

        `sources`: number of corpora whose losses are reported; 0: they are not.
        """
        self.reading_chunks = chunks_that_need_data(config, layout)
        self._device = device
        self._size = (config.training.micro_batch_size, config.model.seq_length)
        self._layout = layout
        positions = torch.arange(self._size[1], device=device.torch_device).expand(self._size)
        self._causal_positions = self._part(positions)
        self._resets_positions = config.data.restarts_positions
        has_positions = self._resets_positions or config.data.separates_documents
        self._names = ("tokens", "labels", "loss_mask", *(("position_ids",) if has_positions else ()))
        self._sources = sources
        self._planes = len(self._names) + (1 if sources else 0)
        self._mask_of_positions = mask_of_positions if config.data.separates_documents else None
        self._reads = layout.tensor_rank == 0
        self._broadcasts = layout.tensor_size > 1
        self.together = 1 if config.data.num_workers == 0 else TOGETHER
        """Microbatches to read at once. Where no thread reads ahead, the whole pipeline would wait for the first stage
        to read them all.
        """

    def read(self, iterator: Iterator[HostMicrobatch], count: int) -> list[Microbatch]:
        """Return the next `count` microbatches of this iterator; collective over the tensor group."""
        batches = list(itertools.islice(iterator, count)) if self._reads else []
        planes_GPBS = self._broadcast(self._packed(batches), (count, self._planes, *self._size), torch.int64)
        sample_tokens_G = planes_GPBS[:, 2].float().sum((1, 2)).unbind()
        masks_G = self._masks(batches, planes_GPBS)
        sources_G = self._sources_of(planes_GPBS)
        planes_GPBS = self._part(planes_GPBS)
        loss_mask_GBS = planes_GPBS[:, 2].float()
        loss_tokens_G = sample_tokens_G
        if self._layout.context_size > 1:
            loss_tokens_G = loss_mask_GBS.sum((1, 2)).unbind()
        columns = (
            planes_GPBS[:, 0].unbind(),
            planes_GPBS[:, 1].unbind(),
            loss_mask_GBS.unbind(),
            loss_tokens_G,
            planes_GPBS[:, 3].unbind() if self._resets_positions else [self._causal_positions] * count,
            masks_G,
            sample_tokens_G,
            [self._layout.context_size] * count,
            sources_G,
        )
        return [Microbatch(*fields) for fields in zip(*columns, strict=True)]

    def work(self, batch: Microbatch) -> None:
        """Return None: all microbatches have the same shape, and padding is computed like text."""

    def _part(self, planes: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of [..., S]."""
        return part_of_rank(planes, -1, rank=self._layout.context_rank, size=self._layout.context_size)

    def _packed(self, batches: list[HostMicrobatch]) -> torch.Tensor | None:
        """Pack the planes to send, int64 [G, P, B, S]; a loss mask has only 0 and 1."""
        if not batches:
            return None
        planes = torch.stack([batch[name].long() for batch in batches for name in self._names])  # type: ignore[literal-required]
        planes = planes.view(len(batches), len(self._names), *self._size)
        if not self._sources:
            return planes
        sources = torch.stack([batch["source"] for batch in batches])
        return torch.cat((planes, sources[:, None, :, None].expand(-1, -1, -1, self._size[1])), 1)

    def _sources_of(self, planes_GPBS: torch.Tensor) -> Sequence[torch.Tensor] | Sequence[None]:
        """Return the corpus of each sample, float32 [B, N], by microbatch."""
        if not self._sources:
            return [None] * len(planes_GPBS)
        numbers = torch.arange(self._sources, device=planes_GPBS.device)
        return (planes_GPBS[:, -1, :, :1] == numbers).float().unbind()

    def _masks(
        self, batches: list[HostMicrobatch], planes_GPBS: torch.Tensor
    ) -> Sequence[torch.Tensor] | Sequence[None]:
        if self._mask_of_positions is None:
            return [None] * len(planes_GPBS)
        here = [batch["position_ids"] for batch in batches] or planes_GPBS[:, 3].cpu().unbind()
        return [self._mask_of_positions(positions_BS) for positions_BS in here]

    def _broadcast(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return broadcast_in_tensor_group(tensor, shape, dtype, self._device, broadcasts=self._broadcasts)


def broadcast_in_tensor_group(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: Device, *, broadcasts: bool
) -> torch.Tensor:
    """Return on the device the tensor that the first rank of the tensor group has on its host; None on the others.

    `broadcasts`: the group has more than one rank.
    """
    here = torch.empty(shape, dtype=dtype, device=device.torch_device) if tensor is None else device.to_device(tensor)
    if broadcasts:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        dist.broadcast(here, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
    return here


class StepFeed:
    """Passes the microbatches of a step to every chunk in order, and reads each microbatch once, several at a time.

    Under the interleaved schedule several chunks may need the same microbatch at different times.
    """

    def __init__(
        self,
        source: MicrobatchSource,
        iterator: Iterator[Any],
        num_microbatches: int,
        *,
        observer: StepObserver | None,
        is_captured: bool = False,
        is_repeated: bool = False,
    ) -> None:
        """Take the data of a step.

        `is_captured`: hooks make its passes longer, so that their times are no measure. `is_repeated`: the step has
        been computed before.
        """
        self._source = source
        self.iterator = iterator
        self.is_captured = is_captured
        self.is_repeated = is_repeated
        self._num_microbatches = num_microbatches
        self._observer = observer
        self._pending: dict[int, tuple[Any, int]] = {}
        self._read = 0

    def take(self, chunk: int, microbatch: int) -> Any | None:  # noqa: ANN401 - the family's microbatch
        """Return this chunk's microbatch, or None if the chunk needs no data."""
        if chunk not in self._source.reading_chunks:
            return None
        if self._read <= microbatch:
            self._fetch(chunk, microbatch)
        return self._release(microbatch)

    def _fetch(self, chunk: int, microbatch: int) -> None:
        """Read the next microbatches of the step, up to this one at least, and never one of the next step."""
        if microbatch >= self._num_microbatches:
            raise ValueError(f"microbatch {microbatch} was requested in a step of {self._num_microbatches}")
        if self._observer is not None:
            self._observer.begin(RecordKind.DATA, chunk, microbatch)
        while self._read <= microbatch:
            count = min(self._source.together, self._num_microbatches - self._read)
            for batch in self._source.read(self.iterator, count):
                self._pending[self._read] = (batch, len(self._source.reading_chunks))
                self._report_work(batch)
                self._read += 1
        if self._observer is not None:
            self._observer.end(RecordKind.DATA)

    def _report_work(self, batch: Any) -> None:  # noqa: ANN401 - the family's microbatch
        if self._observer is not None and (work := self._source.work(batch)) is not None:
            self._observer.work(self._read, tokens=work.tokens, pairs=work.pairs)

    def _release(self, microbatch: int) -> Any:  # noqa: ANN401 - the family's microbatch
        batch, users = self._pending.pop(microbatch)
        if users > 1:
            self._pending[microbatch] = (batch, users - 1)
        return batch


class ChunkFeed:
    """Data iterator of one chunk, as the schedules pass it around."""

    def __init__(self, feed: StepFeed, chunk: int) -> None:
        self.chunk = chunk
        self.microbatch = -1
        self._feed = feed

    @property
    def is_first(self) -> bool:
        """Return True for the first microbatch of the chunk in this step."""
        return self.microbatch == 0

    def next(self) -> Any | None:  # noqa: ANN401 - the family's microbatch
        """Return the chunk's next microbatch."""
        self.microbatch += 1
        return self._feed.take(self.chunk, self.microbatch)


def chunks_that_need_data(config: TrainerConfig, layout: Layout) -> frozenset[int]:
    """Return the chunks of this rank that read tokens (first), labels (last) or an attention mask (all)."""
    if config.data.separates_documents:
        return frozenset(range(layout.virtual_size))
    first = {0} if layout.is_first_stage else set()
    last = {layout.virtual_size - 1} if layout.is_last_stage else set()
    return frozenset(first | last)
