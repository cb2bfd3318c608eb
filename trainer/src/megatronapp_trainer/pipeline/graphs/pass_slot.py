"""The passes of a model chunk, recorded on the static memory of one slot."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatronapp_trainer.models.registry import ModelFamily
from megatronapp_trainer.pipeline.graphs.recorders import Recording, SlotRecorder, Tensors
from megatronapp_trainer.pipeline.weight_gradients import WeightGradientStore, WeightProduct


def copied_tensors(batch: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401 - the family's microbatch
    """Return copies of the tensors of a microbatch by field; other fields are alike in all microbatches of a run."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape, type and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorForm":
        """Return the form of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """Return a tensor of this form, with any contents."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclasses.dataclass(kw_only=True, slots=True)
class PassExample:
    """Forms of the tensors of a chunk's passes, as a pass without a recording has shown them."""

    batch: Any
    """A microbatch whose tensors were copied; None where the chunk reads no data."""
    received: TensorForm | None
    """Form of the input; None on the first stage."""
    output: TensorForm
    """Form of the output, which is the form of its gradient; on the last stage of the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPasses:
    """A chunk, and how its passes run."""

    chunk: Any
    """In megatron-core's DistributedDataParallel."""
    family: ModelFamily
    has_loss: bool
    """The chunk ends the model."""
    store: WeightGradientStore | None
    """Takes the weight gradients of backward passes; None: each pass computes its own."""
    split: bool
    """Backward passes leave the weight gradients for passes of their own."""
    set_input: Callable[[torch.Tensor | None], None]
    """Sets the input of the chunk's next forward pass."""


@dataclasses.dataclass(frozen=True, slots=True)
class LossReport:
    """Results of a forward pass of the last chunk besides its loss."""

    tokens: torch.Tensor
    report: torch.Tensor


class PassSlot:
    """Memory for the passes of one microbatch at a time, and their recordings.

    Inputs are copied into it. Results are copied out of it into ordinary memory: a transfer may read an output for as
    long as it likes, as the outputs of passes without recordings, and no send has to be waited for before the slot is
    used again. The two copies of hidden states take some microseconds of a pass of milliseconds.
    """

    def __init__(self, passes: ChunkPasses, example: PassExample, recorder: SlotRecorder) -> None:
        """Record the passes of a chunk; they have run without recordings before."""
        self._passes = passes
        self._recorder = recorder
        self._own = {} if example.batch is None else copied_tensors(example.batch)
        self._batch = None if example.batch is None else dataclasses.replace(example.batch, **self._own)
        self._input = None if example.received is None else example.received.empty().zero_().requires_grad_()
        self._gradient = example.output.empty().zero_()
        self._live: torch.Tensor | None = None
        """The output, with the graph of autograd; of the last forward pass that computed in Python."""
        self._products: list[WeightProduct] = []
        self._results: Tensors = ()
        self._input_gradient: Tensors = ()
        with passes.chunk.no_sync():  # no reduction of gradients begins in a recording
            self._forward: Recording = recorder.record(self._compute_forward)
            self._backward: Recording = recorder.record(self._compute_backward)
            self._weights: Recording | None = recorder.record(self._compute_weights) if passes.split else None
        # A larger gather elsewhere makes megatron-core replace its shared buffers, of which recordings have addresses.
        self._shared_buffers = _shared_buffers()

    def forward(self, batch: Any, received: torch.Tensor | None) -> tuple[torch.Tensor, LossReport | None]:  # noqa: ANN401 - the family's microbatch
        """Run the forward pass of a microbatch. Returns copies of the output, or of loss and report."""
        given = {name: getattr(batch, name) for name in self._own}
        for name, own in self._own.items():
            if own.shape != given[name].shape:
                raise ValueError(
                    f"{name} of a microbatch has the shape {list(given[name].shape)}, and its passes were recorded for "
                    f"{list(own.shape)}"
                )
        with torch.no_grad():
            if self._own:
                torch._foreach_copy_(list(self._own.values()), list(given.values()), non_blocking=True)
            if self._input is not None and received is not None:
                self._input.copy_(received)
        self._results = self._forward.replay()
        if not self._passes.has_loss:
            return self._results[0].clone(), None
        loss, tokens, report = (result.clone() for result in self._results)
        return loss, LossReport(tokens, report)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Run the backward pass of the forward pass that ran last.

        `gradient`: of its output. Returns a copy of that of its input; None on the first stage.
        """
        with torch.no_grad():
            self._gradient.copy_(gradient)
        self._input_gradient = self._backward.replay()
        return self._input_gradient[0].clone() if self._input_gradient else None

    def weights(self) -> None:
        """Compute the weight gradients that the backward pass has left."""
        assert self._weights is not None, "the backward pass computes the weight gradients"
        self._weights.replay()

    def release(self) -> None:
        """Take the slot back from its microbatch, whose passes were all launched."""
        floats = (self._gradient, *self._results, *self._input_gradient, *self._own.values())
        self._recorder.spoil(floats if self._input is None else (self._input, *floats))

    @torch.enable_grad()
    def _compute_forward(self) -> Tensors:
        passes = self._passes
        passes.set_input(self._input)
        with _without_random_states():
            output = passes.family.forward(passes.chunk, self._batch)
        if not passes.has_loss:
            self._live = output
            return (output.detach(),)
        self._live, tokens, report = passes.family.loss(output, self._batch)
        return self._live.detach(), tokens.detach(), report.detach()

    @torch.enable_grad()
    def _compute_backward(self) -> Tensors:
        live, self._live = self._live, None
        assert live is not None, "a backward pass is recorded after its forward pass"
        if self._passes.split:
            assert self._passes.store is not None, "split backward passes have a store"
            self._products = []
            with self._passes.store.recording(self._products):
                torch.autograd.backward(live, self._gradient)
        else:
            torch.autograd.backward(live, self._gradient)
        if self._input is None:
            return ()
        gradient, self._input.grad = self._input.grad, None
        assert gradient is not None, "a chunk's output depends on its input"
        return (gradient,)

    def _compute_weights(self) -> Tensors:
        assert self._passes.store is not None, "split backward passes have a store"
        self._passes.store.add_recorded(self._products)
        return ()


@contextlib.contextmanager
def _without_random_states() -> Iterator[None]:
    """Leave random generators alone inside.

    Under sequence parallelism megatron-core switches the device's generator to another state around dropout, and back,
    which a capture forbids. Passes with dropout are not recorded, so that nothing is drawn between.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracker.fork = lambda *_names: contextlib.nullcontext()
    try:
        yield
    finally:
        del tracker.fork


def _shared_buffers() -> Tensors:
    from megatron.core.parallel_state import get_global_memory_buffer

    return tuple(get_global_memory_buffer().buffer.values())


def count_hooks(chunk: torch.nn.Module) -> int:
    """Return the number of hooks on the modules of a chunk."""
    return sum(
        len(hooks)
        for module in chunk.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )
