"""A small model with its microbatches, and the two halves of its graph as MegaFBD has them."""

import collections
from collections.abc import Callable
from typing import Any

import small_training

MICROBATCHES = 4
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 4 "
    "--lr 1e-2 --mock-data --vocab-size 120 --eval-iters 0 --global-batch-size 8"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)


class ShippedChunk:
    """A small model with its microbatches, and the two halves of its graph."""

    def __init__(self, flags: str) -> None:
        import torch

        from megatronapp_trainer.checkpoint import random_states
        from megatronapp_trainer.data.microbatches import StepFeed
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
        self.first_states = random_states.capture()
        self.passes: collections.Counter[str] = collections.Counter()
        for module in self.chunk.modules():
            module.register_forward_pre_hook(lambda module, _: self.passes.update([type(module).__name__]))
        self.build()

    def build(self) -> None:
        """Build both halves of the graph, under the recomputation that the modules have now."""
        from megatronapp_trainer.fbd.graph.backward_graph import BackwardGraph
        from megatronapp_trainer.fbd.graph.recorder import ForwardRecorder, learn_saved_tensors
        from megatronapp_trainer.models import gpt

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
        from megatronapp_trainer.fbd.graph.saved_tensors import SegmentMemory

        groups, regions = self.ship_groups(batch)
        return [SegmentMemory(segment) for group in groups for segment in group], regions

    def ship_groups(self, batch: Any) -> tuple[list[list[Any]], list[Any]]:
        """The same as flat tensors, with the segments of each group in a list of their own."""
        groups: list[list[Any]] = []
        with self.recorder.recording(
            lambda group, found: groups.append([segment.flat().clone() for segment in found])
        ) as regions:
            self.forward(batch)
        return groups, regions

    def gradients(self, backward: Callable[[int], object], order: list[int]) -> list[Any]:
        """Gradients summed over microbatches whose backward passes run in this order."""
        self.chunk.zero_grad_buffer()
        for microbatch in order:
            with self.chunk.no_sync():
                backward(microbatch)
        return [parameter.main_grad.clone() for parameter in self.chunk.parameters()]
