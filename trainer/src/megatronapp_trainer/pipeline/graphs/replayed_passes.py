"""Forward steps whose passes are replayed in slots, for schedules that run them in any order."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weights
from megatronapp_trainer.pipeline.graphs.pass_slot import (
    ChunkPasses,
    PassExample,
    PassSlot,
    TensorForm,
    copied_tensors,
    count_hooks,
)
from megatronapp_trainer.pipeline.graphs.recorders import PassRecorders, advice_on_shortage
from megatronapp_trainer.pipeline.graphs.slots import SlotLimits, SlotPool
from megatronapp_trainer.pipeline.schedule import ScheduleContext
from megatronapp_trainer.pipeline.weight_gradients import WeightGradientStore
from megatronapp_trainer.utils.byte_sizes import bytes_text

log = logging.getLogger(__name__)
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class PassFeed(Protocol):
    """Data of the passes of a chunk; see `ChunkFeed` and `TaskFeed`."""

    chunk: int
    microbatch: int

    @property
    def is_first(self) -> bool:
        """Return whether the microbatch is the first one of the chunk in this step."""

    def next(self) -> Any | None:  # noqa: ANN401 - the family's microbatch
        """Return the microbatch; None if the chunk reads no data."""


class PlainStep(Protocol):
    """A forward step without recordings; see `ForwardStep`."""

    def announce(self, feed: Any, model: Any) -> None:  # noqa: ANN401 - feed, DDP
        """Announce the pass whose data has been read."""

    def compute(self, model: Any, batch: Any) -> tuple[torch.Tensor, LossFunction]:  # noqa: ANN401 - DDP, microbatch
        """Run a microbatch through a chunk. Returns its output, and the loss to apply if this is the last chunk."""


class ReplayedPasses:
    """The forward step of schedules whose passes are replayed, in the place of `ForwardStep`.

    The output of a replayed forward pass has a node of autograd that replays the backward pass, so that schedules run
    both as they always do. The division by the number of microbatches and the scale of the loss are not recorded.

    All slots of a step are recorded before its first pass, from the second step on: a capture waits for the device, on
    which within a step transfers wait for other ranks. A step whose modules have hooks (captures, perturbations,
    windows of detailed spans) runs without recordings, and so does the one after it; their memory is free meanwhile.
    So does a step in which parts of passes are observed, on all ranks of a tensor group or on none: NCCL requires that
    all ranks of a communicator capture and replay a collective, or none of them.
    Passes that gather weights or reduce gradients run without recordings, too, so that these transfers overlap them.
    """

    def __init__(
        self,
        context: ScheduleContext,
        step: PlainStep,
        recorders: PassRecorders,
        stores: Sequence[WeightGradientStore] = (),
        *,
        split: bool = False,
        fp8_weights: Fp8Weights | None = None,
    ) -> None:
        """Take a run.

        `step` announces its passes and runs those without recordings; `stores` take the weight gradients of each chunk,
        and with `split` compute them in passes of their own.
        """
        self._step = step
        self._recorders = recorders
        self._passes = [
            _chunk_passes(context, index, stores[index] if stores else None, split=split)
            for index in range(len(context.chunks))
        ]
        self._chunks: list[Any] = context.chunks
        self._observer = context.observer
        self._fp8_weights = fp8_weights
        parallel = context.config.parallel
        self._gathers, self._reduces = parallel.overlap_param_gather, parallel.overlap_grad_reduce
        self._examples: list[PassExample | None] = [None] * len(self._chunks)
        self._slots: list[list[PassSlot]] = [[] for _ in self._chunks]
        self._pool = SlotPool()
        self._limits: dict[int, SlotLimits] = {}
        """By the number of microbatches of a step."""
        self._anchor = torch.empty(0, requires_grad=True)
        """Gives the outputs of chunks without an input a node of autograd."""
        self._hooks = self._count_hooks()
        self._is_warm = False
        self._replays = False
        self._num_microbatches = 0

    @contextlib.contextmanager
    def step(self, feed: StepFeed, num_microbatches: int, limits: Callable[[], SlotLimits]) -> Iterator[None]:
        """Within the context the passes of a step run, on the stream of recordings.

        `limits` returns the slots of steps of this many microbatches; it is called once for each number.

        Raises:
            SlotsExhaustedError: more microbatches are in flight than exact limits say.
            TaskOrderError: the step ends before the last pass of a microbatch.
        """
        with self._recorders.on_stream():
            self._begin(feed, num_microbatches, limits)
            yield
            self._pool.end_step()
        if self._replays and self._pool.shortages:
            log.info(
                "CUDA graphs: %d of %d forward passes of the step found no slot and ran without a graph",
                self._pool.shortages,
                num_microbatches * len(self._chunks),
            )

    def __call__(self, feed: PassFeed, model: Any) -> tuple[torch.Tensor, LossFunction]:  # noqa: ANN401 - DDP
        """Run one microbatch through one chunk."""
        batch = feed.next()
        self._step.announce(feed, model)
        chunk, microbatch = feed.chunk, feed.microbatch
        is_last = microbatch == self._num_microbatches - 1
        communicates = (self._reduces and is_last) or (self._gathers and feed.is_first)
        slot = None if communicates or not self._replays else self._pool.take(chunk, microbatch)
        if slot is None:
            return self._plain(chunk, model, batch)
        self._prepare_weights(chunk)
        recorded, passes = self._slots[chunk][slot], self._passes[chunk]
        received = _input_of(model)
        passes.set_input(None)  # what was received is the schedule's to free
        replay = _Replay(self._pool, recorded, passes, chunk, microbatch)
        output: torch.Tensor = _ReplayedPass.apply(self._anchor, received, replay, batch)  # type: ignore[no-untyped-call]
        report = replay.report
        if report is None:
            return output, _no_loss
        return output, lambda loss: (loss, report.tokens, report.report)

    def close(self) -> None:
        """Let the recordings go: communicators whose collectives are in graphs cannot end before them."""
        if any(self._slots):
            self._recorders.drop(self._slots)

    def _begin(self, feed: StepFeed, num_microbatches: int, limits: Callable[[], SlotLimits]) -> None:
        # Recordings wait for all gathers of weights before the first pass: data-parallel ranks record together.
        is_observed = self._observer is not None and self._observer.observes_parts(anywhere=self._gathers)
        is_plain = not (feed.is_captured or is_observed) and self._count_hooks() == self._hooks
        # Where each microbatch of a step communicates, recordings would have no use.
        is_useful = num_microbatches > self._gathers + self._reduces
        self._replays = self._is_warm and is_plain and is_useful
        self._is_warm = is_plain
        self._num_microbatches = num_microbatches
        if self._replays:
            if num_microbatches not in self._limits:
                self._limits[num_microbatches] = limits()
            self._pool.begin_step(self._limits[num_microbatches])
            with advice_on_shortage():
                self._record(self._limits[num_microbatches])
        elif any(self._slots) and not is_plain:
            self._recorders.drop(self._slots)

    def _record(self, limits: SlotLimits) -> None:
        """Record the slots that are missing; ranks of a tensor group do it in the same order."""
        missing = [max(0, count - len(slots)) for count, slots in zip(limits.counts, self._slots, strict=True)]
        if not any(missing):
            return
        if self._gathers:
            self._finish_gathers()
        for passes in self._passes:
            passes.set_input(None)  # what the last pass received is not let go within a capture
        before = self._recorders.reserved_bytes()
        for chunk, count in enumerate(missing):
            self._prepare_weights(chunk)
            if self._fp8_weights is not None:
                self._fp8_weights.record(chunk, lambda compute: self._recorders.slot().record(compute).replay)
            for _ in range(count):
                example = self._examples[chunk]
                assert example is not None, "a chunk whose passes are recorded has run"
                self._slots[chunk].append(PassSlot(self._passes[chunk], example, self._recorders.slot()))
        added = self._recorders.reserved_bytes() - before
        log.info(
            "CUDA graphs: recorded passes of %s microbatches in flight (by model chunk), in %s of memory",
            ", ".join(str(len(slots)) for slots in self._slots),
            bytes_text(added),
        )

    def _prepare_weights(self, chunk: int) -> None:
        if self._fp8_weights is not None:
            self._fp8_weights.prepare(chunk)

    def _finish_gathers(self) -> None:
        """Wait for weights that are gathered: a capture must not wait for what began outside of it."""
        for chunk in self._chunks:
            for group in chunk.bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _plain(self, chunk: int, model: Any, batch: Any) -> tuple[torch.Tensor, LossFunction]:  # noqa: ANN401
        """Run a pass without a recording; the first one of a chunk is the example for recordings."""
        received = _input_of(model)
        output, loss = self._step.compute(model, batch)
        if self._examples[chunk] is not None:
            return output, loss
        example = PassExample(
            batch=None if batch is None else _copied(batch),
            received=None if received is None else TensorForm.of(received),
            output=TensorForm.of(output),
        )
        if not self._passes[chunk].has_loss:
            self._examples[chunk] = example
            return output, loss

        def observed(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total, tokens, report = loss(losses)
            example.output = TensorForm.of(total)
            self._examples[chunk] = example
            return total, tokens, report

        return output, observed

    def _count_hooks(self) -> int:
        return sum(map(count_hooks, self._chunks))


class _Replay:
    """A microbatch in a slot, from its forward to its last backward pass."""

    def __init__(self, pool: SlotPool, slot: PassSlot, passes: ChunkPasses, chunk: int, microbatch: int) -> None:
        self._pool = pool
        self._slot = slot
        self._passes = passes
        self._chunk = chunk
        self._microbatch = microbatch
        self.report: Any = None

    def forward(self, batch: Any, received: torch.Tensor | None) -> torch.Tensor:  # noqa: ANN401 - the family's microbatch
        output, self.report = self._slot.forward(batch, received)
        return output

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        result = self._slot.backward(gradient)
        if self._passes.split:
            assert self._passes.store is not None, "split backward passes have a store"
            self._passes.store.replay_later(self._microbatch, self._weights)
        else:
            self._release()
        return result

    def _weights(self) -> None:
        self._slot.weights()
        self._release()

    def _release(self) -> None:
        self._slot.release()
        self._pool.give_back(self._chunk, self._microbatch)


class _ReplayedPass(torch.autograd.Function):
    """Both passes of a chunk as one operation."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        _anchor: torch.Tensor,
        received: torch.Tensor | None,
        replay: _Replay,
        batch: Any,  # noqa: ANN401 - the family's microbatch
    ) -> torch.Tensor:
        ctx.replay = replay
        return replay.forward(batch, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - torch's
        return None, ctx.replay.backward(gradient), None, None


def _chunk_passes(
    context: ScheduleContext, index: int, store: WeightGradientStore | None, *, split: bool
) -> ChunkPasses:
    from megatron.core.utils import get_attr_wrapped_model

    chunk = context.chunks[index]
    set_input = get_attr_wrapped_model(chunk, "set_input_tensor")
    return ChunkPasses(
        chunk=chunk,
        family=context.family,
        has_loss=bool(get_attr_wrapped_model(chunk, "post_process")),
        store=store,
        split=split,
        set_input=lambda tensor: set_input([tensor]),
    )


def _input_of(model: Any) -> torch.Tensor | None:  # noqa: ANN401 - DDP
    """Return the input that the schedule has set for a chunk; None on the first stage."""
    from megatron.core.utils import get_attr_wrapped_model

    received: torch.Tensor | None = get_attr_wrapped_model(model, "decoder").input_tensor
    return received


def _copied(batch: Any) -> Any:  # noqa: ANN401 - the family's microbatch
    return dataclasses.replace(batch, **copied_tensors(batch))


def _no_loss(_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise AssertionError("a chunk without labels was asked for a loss")
