"""Backward passes on shipped tensors: gradients bit-equal to those of plain ones, from a graph built once."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import small_training

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
MICROBATCHES = 4
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 4 "
    "--lr 1e-2 --mock-data --vocab-size 120 --eval-iters 0 --global-batch-size 8"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
CASES = {
    "dropout": "",  # 0.1 by default
    "llama-bf16": f"{LLAMA} --bf16 --attention-dropout 0 --hidden-dropout 0",
    "local": "--transformer-impl local --openai-gelu",
    "full-recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective-recompute": "--recompute-granularity selective",
    "half-recomputed-bf16": "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --bf16",
}


class Chunk:
    """A small model with its microbatches, and the two halves of its graph."""

    def __init__(self, flags: str) -> None:
        import torch

        from megatronapp_trainer.data.microbatches import StepFeed
        from megatronapp_trainer.fbd.graph.backward_graph import BackwardGraph
        from megatronapp_trainer.fbd.graph.recorder import ForwardRecorder, learn_saved_tensors
        from megatronapp_trainer.models import gpt
        from megatronapp_trainer.training.build import build_iterators

        self.torch = torch
        self.run = small_training.prepare(f"{MODEL} {flags}")
        (self.chunk,) = self.run.state.chunks
        iterators = build_iterators(self.run.config, self.run.layout, 0)
        feed = StepFeed(
            gpt.batch_source(self.run.config, self.run.layout, self.run.device),
            iterators.train,
            MICROBATCHES,
            observer=None,
        )
        self.batches = [feed.take(0, microbatch) for microbatch in range(MICROBATCHES)]
        self.forwards = 0
        example = gpt.example_batch(self.run.config, self.run.layout, self.run.device)
        self.saved, self.states = learn_saved_tensors(self.chunk.module, lambda: self.forward(example))
        self.graph = BackwardGraph(self.chunk.module, lambda received: self.forward(example, received), None)
        self.recorder = ForwardRecorder(self.chunk.module, self.saved)

    def forward(self, batch: Any, received: Any = None) -> Any:
        """The sum of the losses of a microbatch."""
        from megatronapp_trainer.fbd.forward_passes import run_forward
        from megatronapp_trainer.models import gpt

        self.forwards += 1
        return run_forward(gpt, self.chunk, batch, received, is_last_stage=True).output

    def ship(self, batch: Any) -> tuple[list[Any], list[Any]]:
        """Copies of the segments that a forward pass saves, and the states of its recomputed regions."""
        segments: list[Any] = []
        with self.recorder.recording(
            lambda group, found: segments.extend(segment.clone() for segment in found)
        ) as regions:
            self.forward(batch)
        return segments, regions

    def gradients(self, backward: Callable[[int], object], order: list[int]) -> list[Any]:
        """Gradients summed over microbatches whose backward passes run in this order."""
        self.chunk.zero_grad_buffer()
        for microbatch in order:
            with self.chunk.no_sync():
                backward(microbatch)
        return [parameter.main_grad.clone() for parameter in self.chunk.parameters()]


def compare(flags: str, order: list[int]) -> dict[str, Any]:
    """Gradients with and without shipping, where the passes draw the same random numbers."""
    from megatronapp_trainer.checkpoint import random_states

    chunk = Chunk(flags)
    states = random_states.capture()
    losses = [chunk.forward(batch) for batch in chunk.batches]
    expected = chunk.gradients(lambda microbatch: losses[microbatch].backward(), order)
    random_states.restore(states)
    shipped = [chunk.ship(batch) for batch in chunk.batches]
    forwards = chunk.forwards
    loss_gradient = chunk.torch.ones(())
    found = chunk.gradients(lambda microbatch: chunk.graph.backward(*shipped[microbatch], loss_gradient), order)
    return {
        "equal": all(chunk.torch.equal(*pair) for pair in zip(expected, found, strict=True)),
        "moved": any(bool(gradient.abs().sum()) for gradient in expected),
        "same form": chunk.saved == chunk.graph.saved,
        "forwards since": chunk.forwards - forwards,
    }


@pytest.mark.parametrize("flags", CASES.values(), ids=list(CASES))
def test_gradients_from_shipped_tensors_are_bit_equal(run_ranks: RunRanks, flags: str) -> None:
    order = list(range(MICROBATCHES))
    random.shuffle(order)
    (result,) = run_ranks(1, compare, flags, order)
    assert result == {"equal": True, "moved": True, "same form": True, "forwards since": 0}, order


def refusals() -> list[str]:
    """Errors of passes that save other tensors than the first one, or whose tensors are written into."""
    from megatronapp_trainer.errors import TransferError

    chunk = Chunk("--attention-dropout 0 --hidden-dropout 0")
    texts = []

    def attempt(change: Callable[[], Any]) -> None:
        try:
            with chunk.recorder.recording(lambda group, found: None):
                change()
        except TransferError as error:
            texts.append(str(error))

    attempt(lambda: None)
    half = chunk.torch.nn.functional.gelu
    attempt(lambda: half(chunk.torch.ones(3, requires_grad=True)))

    def double_input(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        with chunk.torch.no_grad():
            arguments[0].mul_(2)

    def overwrite() -> None:
        layer = chunk.chunk.module.decoder.layers[0].mlp.linear_fc2
        handle = layer.register_forward_hook(double_input)
        try:
            chunk.forward(chunk.batches[0])
        finally:
            handle.remove()

    attempt(overwrite)
    return texts


def test_a_pass_that_saves_something_else_is_refused(run_ranks: RunRanks) -> None:
    ((nothing, other, overwritten),) = run_ranks(1, refusals)
    assert "has saved 0 tensors" in nothing
    assert "in the first pass" in other
    assert "changed in place after it was saved" in overwritten
