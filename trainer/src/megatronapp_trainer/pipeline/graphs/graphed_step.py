"""Steps on one pipeline stage whose microbatches are replayed: one CUDA graph for each pass of a microbatch."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.device.cuda_graphs import own_workspace
from megatronapp_trainer.device.graph_stream import graph_stream, on_graph_stream
from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weights
from megatronapp_trainer.parallel.groups import schedule_groups
from megatronapp_trainer.pipeline.graphs.pass_slot import copied_tensors, count_hooks
from megatronapp_trainer.pipeline.graphs.recorders import GraphRecorders, advice_on_shortage
from megatronapp_trainer.pipeline.pass_timers import PassTimers
from megatronapp_trainer.pipeline.schedule import ScheduleContext


@dataclasses.dataclass(frozen=True, slots=True)
class _GivenMicrobatch:
    """Data of a single microbatch, in the place of a `ChunkFeed`."""

    batch: Any
    microbatch: int
    chunk: int = 0

    @property
    def is_first(self) -> bool:
        return self.microbatch == 0

    def next(self) -> Any:  # noqa: ANN401 - the family's microbatch
        return self.batch


class MicrobatchGraph:
    """CUDA graphs of both passes of a microbatch, which read its data from the same memory each time."""

    def __init__(
        self,
        forward: Callable[[Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        backward: Callable[[torch.Tensor], None],
        example: Any,  # noqa: ANN401 - the family's microbatch
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture on `stream`, which must be the current one; nothing is computed yet.

        All passes must have run once without a graph, so that libraries are initialised and kernels are compiled.

        Args:
            forward: runs the forward pass; returns loss, report and tokens.
            backward: runs the backward pass from the loss.
            example: a microbatch of the form of all others.
            stream: of the passes.
        """
        self._own = copied_tensors(example)
        batch = dataclasses.replace(example, **self._own)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads go on with work of their own on the device.
        options: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
        with own_workspace():
            with torch.cuda.graph(self._forward, **options):
                loss, self._report, self._tokens = forward(batch)
            with torch.cuda.graph(self._backward, pool=self._forward.pool(), **options):
                backward(loss)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - the family's microbatch
        """Run the forward pass; returns the report, and the tokens, which the next one overwrites."""
        given = [getattr(batch, name) for name in self._own]
        torch._foreach_copy_(list(self._own.values()), given, non_blocking=True)
        self._forward.replay()
        return self._report.clone(), self._tokens

    def backward(self) -> None:
        """Run the backward pass of the forward pass that ran last."""
        self._backward.replay()


class GraphedStep:
    """Runs the steps of a chunk that is a whole model, in the order of megatron-core's schedule without a pipeline.

    Loss, its scale and its division are part of the graphs; `ReplayedPasses` has the other layouts.

    A step whose modules have hooks, as those of captures, perturbations and windows of detailed spans, runs without
    graphs, and so does the one after it: the memory of the graphs is free until they are captured again.
    """

    def __init__(
        self,
        context: ScheduleContext,
        forward_step: Any,  # noqa: ANN401 - ForwardStep
        plain_step: Any,  # noqa: ANN401 - ForwardStep
        timers: PassTimers | None,
        fp8_weights: Fp8Weights | None,
    ) -> None:
        """Take a run; `forward_step` announces its passes to `timers`, `plain_step` does not."""
        (self._chunk,) = context.chunks
        self._core_config = context.core_config
        self._forward_step, self._plain_step = forward_step, plain_step
        self._timers = timers
        self._fp8_weights = fp8_weights
        self._groups = schedule_groups()
        self._device = next(self._chunk.parameters()).device
        parallel = context.config.parallel
        self._gathers, self._reduces = parallel.overlap_param_gather, parallel.overlap_grad_reduce
        self._graph: MicrobatchGraph | None = None
        self._graph_microbatches = 0
        self._is_warm = False
        self._hooks = count_hooks(self._chunk)

    def train(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run a step, as `PipelineSchedule.train`."""
        is_plain = not feed.is_captured and count_hooks(self._chunk) == self._hooks
        replays = self._is_warm and is_plain
        if not replays and self._graph is not None:
            self._graph = None
            torch.cuda.empty_cache()
        self._is_warm = is_plain
        if self._timers is not None:
            self._timers.begin_step((0, microbatch) for microbatch in range(num_microbatches))
        with on_graph_stream(self._device):
            reports, tokens = self._run(feed, num_microbatches, replays=replays)
            per_token = tokens if self._core_config.calculate_per_token_loss else None
            self._core_config.finalize_model_grads_func([self._chunk], per_token, pg_collection=self._groups)
        return reports

    def _run(self, feed: StepFeed, num_microbatches: int, *, replays: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run the passes of all microbatches; those that gather weights or reduce gradients run without a graph."""
        reports = []
        total = torch.zeros([], dtype=torch.int, device=self._device)
        for microbatch in range(num_microbatches):
            batch = feed.take(0, microbatch)
            is_last = microbatch == num_microbatches - 1
            communicates = (self._reduces and is_last) or (self._gathers and microbatch == 0)
            with contextlib.nullcontext() if is_last else self._chunk.no_sync():
                if replays and not communicates:
                    report, tokens = self._replay(batch, microbatch, num_microbatches)
                else:
                    loss, report, tokens = self._forward(self._forward_step, batch, microbatch, num_microbatches)
                    self._backward(loss)
            reports.append(report)
            total += tokens
        return reports, total

    def _replay(self, batch: Any, microbatch: int, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - the family's microbatch
        if self._fp8_weights is not None:
            self._fp8_weights.prepare(0)
        with advice_on_shortage():
            graph = self._graph_for(batch, num_microbatches)
        if self._timers is None:
            result = graph.forward(batch)
            graph.backward()
            return result
        self._timers.begin_forward(0, microbatch)
        result = graph.forward(batch)
        self._timers("forward-compute").stop()
        self._timers("backward-compute").start()
        graph.backward()
        self._timers("backward-compute").stop()
        return result

    def _graph_for(self, batch: Any, num_microbatches: int) -> MicrobatchGraph:  # noqa: ANN401 - the family's microbatch
        """Return the graphs for steps of this length, by which each loss is divided."""
        graph = self._graph
        if graph is None or self._graph_microbatches != num_microbatches:
            self._graph = None  # its memory is free before the next one takes as much
            timers, self._core_config.timers = self._core_config.timers, None  # no event of theirs is captured
            try:
                if self._fp8_weights is not None:
                    recorder = GraphRecorders(self._device).slot()
                    self._fp8_weights.record(0, lambda compute: recorder.record(compute).replay)
                with self._chunk.no_sync():
                    graph = MicrobatchGraph(
                        lambda example: self._forward(self._plain_step, example, 1, num_microbatches),
                        self._backward,
                        batch,
                        graph_stream(self._device),
                    )
            finally:
                self._core_config.timers = timers
            self._graph, self._graph_microbatches = graph, num_microbatches
        return graph

    def _forward(
        self,
        step: Any,  # noqa: ANN401 - ForwardStep
        batch: Any,  # noqa: ANN401 - the family's microbatch
        microbatch: int,
        num_microbatches: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run a forward pass as megatron-core's schedules do; returns loss, report and tokens."""
        from megatron.core.pipeline_parallel.schedules import forward_step

        reports: list[torch.Tensor] = []
        loss, tokens = forward_step(
            step,
            _GivenMicrobatch(batch, microbatch),
            self._chunk,
            num_microbatches,
            None,
            reports,
            self._core_config,
            self._groups.cp.size(),
            is_first_microbatch=microbatch == 0,
            current_microbatch=microbatch,
        )
        return loss, reports[0], tokens

    def _backward(self, loss: torch.Tensor) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel.schedules import backward_step

        backward_step(None, loss, None, ModelType.encoder_or_decoder, self._core_config)
