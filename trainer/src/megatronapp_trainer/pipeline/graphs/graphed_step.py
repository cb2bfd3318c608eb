"""Steps on one pipeline stage whose microbatches are replayed, each pass by a recording."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weights
from megatronapp_trainer.parallel.groups import schedule_groups
from megatronapp_trainer.pipeline.graphs.bucket_transfers import BucketTransfers
from megatronapp_trainer.pipeline.graphs.pass_slot import copied_tensors, count_hooks
from megatronapp_trainer.pipeline.graphs.recorders import PassRecorders, SlotRecorder, Tensors, advice_on_shortage
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
    """Recordings of both passes of a microbatch, which read its data from the same memory each time."""

    def __init__(
        self,
        forward: Callable[[Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        backward: Callable[[torch.Tensor], None],
        example: Any,  # noqa: ANN401 - the family's microbatch
        recorder: SlotRecorder,
        *,
        gathers: BucketTransfers | None = None,
        reduces: BucketTransfers | None = None,
    ) -> None:
        """Record on the current stream, that of the recorder; nothing is computed yet on a device.

        All passes must have run once without a recording, so that libraries are initialised and kernels are compiled.

        Args:
            forward: runs the forward pass; returns loss, report and tokens.
            backward: runs the backward pass from the loss.
            example: a microbatch of the form of all others.
            recorder: of all microbatches, whose passes follow each other.
            gathers: what the forward pass waits for.
            reduces: what the backward pass begins.
        """
        self._own = copied_tensors(example)
        batch = dataclasses.replace(example, **self._own)
        losses: list[torch.Tensor] = []

        @torch.enable_grad()
        def run_forward() -> Tensors:
            loss, report, tokens = forward(batch)
            losses.append(loss)
            return report, tokens

        @torch.enable_grad()
        def run_backward() -> Tensors:
            backward(losses.pop())
            return ()

        self._forward = recorder.record(run_forward, gathers)
        self._backward = recorder.record(run_backward, reduces)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - the family's microbatch
        """Run the forward pass; returns the report, and the tokens, which the next one overwrites."""
        given = [getattr(batch, name) for name in self._own]
        torch._foreach_copy_(list(self._own.values()), given, non_blocking=True)
        report, tokens = self._forward.replay()
        return report.clone(), tokens

    def backward(self) -> None:
        """Run the backward pass of the forward pass that ran last."""
        self._backward.replay()


class GraphedStep:
    """Runs the steps of a chunk that is a whole model, in the order of megatron-core's schedule without a pipeline.

    Loss, its scale and its division are part of the graphs; `ReplayedPasses` has the other layouts. The first
    microbatch of a step has separate graphs if weights are gathered meanwhile, and the last one if gradients are
    reduced; all share their memory.

    A step whose modules have hooks, as those of captures, perturbations and windows of detailed spans, runs without
    graphs, and so does the one after it: the memory of the graphs is free until they are captured again.
    """

    def __init__(
        self,
        context: ScheduleContext,
        forward_step: Any,  # noqa: ANN401 - ForwardStep
        plain_step: Any,  # noqa: ANN401 - ForwardStep
        recorders: PassRecorders,
        *,
        timers: PassTimers | None,
        fp8_weights: Fp8Weights | None,
    ) -> None:
        """Take a run; `forward_step` announces its passes to `timers`, `plain_step` does not."""
        (self._chunk,) = context.chunks
        self._core_config = context.core_config
        self._forward_step, self._plain_step = forward_step, plain_step
        self._recorders = recorders
        self._timers = timers
        self._fp8_weights = fp8_weights
        self._groups = schedule_groups()
        self._device = next(self._chunk.parameters()).device
        parallel = context.config.parallel
        self._gathers, self._reduces = parallel.overlap_param_gather, parallel.overlap_grad_reduce
        self._recorder: SlotRecorder | None = None
        self._graphs: dict[tuple[bool, bool], MicrobatchGraph] = {}
        """By whether they gather weights, and whether they reduce gradients."""
        self._graph_microbatches = 0
        self._is_warm = False
        self._hooks = count_hooks(self._chunk)

    def train(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run a step, as `PipelineSchedule.train`."""
        is_plain = not feed.is_captured and count_hooks(self._chunk) == self._hooks
        replays = self._is_warm and is_plain
        if not replays and self._graphs:
            self._drop_graphs()
        self._is_warm = is_plain
        if self._timers is not None:
            self._timers.begin_step((0, microbatch) for microbatch in range(num_microbatches))
        with self._recorders.on_stream():
            reports, tokens = self._run(feed, num_microbatches, replays=replays)
            per_token = tokens if self._core_config.calculate_per_token_loss else None
            self._core_config.finalize_model_grads_func([self._chunk], per_token, pg_collection=self._groups)
        return reports

    def _run(self, feed: StepFeed, num_microbatches: int, *, replays: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run the passes of all microbatches.

        Weights in 8 bits are rounded from whole ones, before the first replay: the microbatch in which they are
        gathered runs without a graph.
        """
        reports = []
        total = torch.zeros([], dtype=torch.int, device=self._device)
        for microbatch in range(num_microbatches):
            batch = feed.take(0, microbatch)
            is_last = microbatch == num_microbatches - 1
            gathers, reduces = self._gathers and microbatch == 0, self._reduces and is_last
            with contextlib.nullcontext() if is_last else self._chunk.no_sync():
                if replays and not (gathers and self._fp8_weights is not None):
                    if (gathers, reduces) not in self._graphs or self._graph_microbatches != num_microbatches:
                        self._record(batch, num_microbatches, gathers=gathers, reduces=reduces)
                    report, tokens = self._replay(batch, microbatch, self._graphs[gathers, reduces])
                else:
                    loss, report, tokens = self._forward(self._forward_step, batch, microbatch, num_microbatches)
                    self._backward(loss)
            reports.append(report)
            total += tokens
        return reports, total

    def _replay(self, batch: Any, microbatch: int, graph: MicrobatchGraph) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - the family's microbatch
        if self._fp8_weights is not None:
            self._fp8_weights.prepare(0)
        if self._timers is None:
            result = graph.forward(batch)
            graph.backward()
            return result
        self._forward_step.announce(_GivenMicrobatch(batch, microbatch), self._chunk)
        result = graph.forward(batch)
        self._timers("forward-compute").stop()
        self._timers("backward-compute").start()
        graph.backward()
        self._timers("backward-compute").stop()
        return result

    def _record(self, batch: Any, num_microbatches: int, *, gathers: bool, reduces: bool) -> None:  # noqa: ANN401 - the family's microbatch
        """Record the passes of a microbatch, for steps of this length, by which each loss is divided."""
        if self._graph_microbatches != num_microbatches:
            self._drop_graphs()  # their memory is free before the next ones take as much
            self._graph_microbatches = num_microbatches

        def forward(example: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # noqa: ANN401 - as above
            with self._without_timers():
                return self._forward(self._plain_step, example, 1, num_microbatches)

        def backward(loss: torch.Tensor) -> None:
            with self._without_timers():
                self._backward(loss)

        with advice_on_shortage():
            if self._recorder is None:
                self._recorder = self._recorders.slot()
                if self._fp8_weights is not None:
                    weights = self._recorders.slot()
                    self._fp8_weights.record(0, lambda compute: weights.record(compute).replay)
            self._graphs[gathers, reduces] = MicrobatchGraph(
                forward,
                backward,
                batch,
                self._recorder,
                gathers=BucketTransfers(self._chunk, gathers=True, reduces=False) if gathers else None,
                reduces=BucketTransfers(self._chunk, gathers=False, reduces=True) if reduces else None,
            )

    @contextlib.contextmanager
    def _without_timers(self) -> Iterator[None]:
        """Let megatron-core announce no pass inside: replays are announced, and no event of theirs is captured."""
        timers, self._core_config.timers = self._core_config.timers, None
        try:
            yield
        finally:
            self._core_config.timers = timers

    def _drop_graphs(self) -> None:
        self._recorder = None
        self._recorders.drop([self._graphs])

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
