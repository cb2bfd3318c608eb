"""Forward and backward passes of single tasks, through megatron-core's functions."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.parallel.groups import schedule_groups
from megatronapp_trainer.parallel.vee_gradients import finalize_vee
from megatronapp_trainer.pipeline.graphs.choice import pass_recorders
from megatronapp_trainer.pipeline.graphs.replayed_passes import ReplayedPasses
from megatronapp_trainer.pipeline.graphs.slots import SlotLimits
from megatronapp_trainer.pipeline.megatron_schedules import (
    ForwardStep,
    connect_gradients,
    fp8_weights_of,
    install_pass_timers,
    within_step,
)
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, Task
from megatronapp_trainer.pipeline.schedule import ScheduleContext
from megatronapp_trainer.pipeline.split_backward import (
    fused_gradients,
    install_split_backward,
    uses_small_kernels,
)
from megatronapp_trainer.pipeline.task_random import TaskRandom
from megatronapp_trainer.pipeline.weight_gradients import sum_rows


class TaskFeed:
    """Data of one chunk and one microbatch, in the place of a `ChunkFeed`."""

    def __init__(self, feed: StepFeed, task: Task, *, is_first: bool) -> None:
        """Take a step's data; `is_first`: no other forward task of the chunk has run in this step."""
        self.is_first = is_first
        self.chunk = task.chunk
        self.microbatch = task.microbatch
        self._feed = feed

    def next(self) -> Any | None:  # noqa: ANN401 - the family's microbatch
        """Return the microbatch of the task."""
        return self._feed.take(self.chunk, self.microbatch)


class TaskPasses:
    """Runs the tasks of a step on this rank's chunks, in any order that their inputs allow.

    Gradients are reduced as they become complete, in the last backward and weight tasks of each chunk.
    """

    def __init__(self, context: ScheduleContext, placement: Placement, *, split: bool) -> None:
        """Take the chunks of a run; `split`: backward tasks leave the weight gradients to weight tasks."""
        self._chunks = context.chunks
        self._placement = placement
        self._rank = context.layout.pipeline_rank
        self._groups = schedule_groups()
        connect_gradients(context)
        self._timers = install_pass_timers(context)
        self._forward_step: ForwardStep | ReplayedPasses = ForwardStep(context.family, self._timers)
        # The transport keeps what it sends, so that outputs can be freed also where megatron-core's own transfers of
        # several chunks still read them. A copy: evaluations run megatron-core's schedule with the given one.
        self._core_config = copy.copy(context.core_config)
        self._core_config.deallocate_pipeline_outputs = True
        self._split = split
        self.fp8_weights = fp8_weights_of(context)
        gradients = fused_gradients(context)
        self._stores = install_split_backward(
            context.chunks,
            fused=gradients is not None,
            sum_rows=sum_rows if gradients is None else gradients,
            embedding_rows=gradients is not None and uses_small_kernels(context.config),
            fp8_weights=self.fp8_weights,
        )
        self._replayed: ReplayedPasses | None = None
        if (recorders := pass_recorders(context)) is not None:
            self._replayed = ReplayedPasses(
                context, self._forward_step, recorders, self._stores, split=split, fp8_weights=self.fp8_weights
            )
            self._forward_step = self._replayed
        self._random = TaskRandom() if context.config.model.has_dropout else None
        self._device = next(context.chunks[0].parameters()).device

    @contextlib.contextmanager
    def step(self, feed: StepFeed, num_microbatches: int, limits: Callable[[], SlotLimits]) -> Iterator[None]:
        """Give the context of a step, from `begin_step` to `end_step`; `limits` as in `ReplayedPasses`."""
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(within_step(self.fp8_weights))
            if self._replayed is not None:
                contexts.enter_context(self._replayed.step(feed, num_microbatches, limits))
            yield

    def close(self) -> None:
        """Let recordings of passes go."""
        if self._replayed is not None:
            self._replayed.close()

    def begin_step(self, feed: StepFeed, num_microbatches: int) -> None:
        """Begin a step; `feed` has its microbatches."""
        self._feed = feed
        self._num_microbatches = num_microbatches
        self._begun: set[int] = set()
        self._reports: dict[int, list[torch.Tensor]] = {}
        self._tokens = torch.zeros([], dtype=torch.int, device=self._device)
        self._saved: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        for store in self._stores:
            store.begin_step(num_microbatches)
        if self._random is not None:
            self._random.begin_step()

    def announce(self, task: Task, *, early: bool) -> None:
        """Take the task that runs next, for the observer; `early`: before its turn in the plan."""
        if self._timers is not None:
            self._timers.begin_task(task.chunk, task.microbatch, early=early)

    def forward(self, task: Task, received: torch.Tensor | None) -> torch.Tensor:
        """Run a forward pass. Returns the chunk's output, without its graph; of the last stage the loss."""
        from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor, forward_step

        if received is not None:
            received.requires_grad_()
        if self._random is not None:
            self._random.seed(task)
        is_first = task.chunk not in self._begun  # of the chunk in this step, whichever microbatch came first
        self._begun.add(task.chunk)
        reports = self._reports.setdefault(task.microbatch, [])
        is_last_stage = self._placement.stage(self._rank, task.chunk) == self._placement.stages - 1
        output, tokens = forward_step(
            self._forward_step,
            TaskFeed(self._feed, task, is_first=is_first),
            self._chunks[task.chunk],
            self._num_microbatches,
            received,
            reports,
            self._core_config,
            cp_group_size=self._groups.cp.size(),
            is_first_microbatch=is_first,
            current_microbatch=task.microbatch,
            vp_stage=task.chunk if len(self._chunks) > 1 else None,
            is_last_stage=is_last_stage,
        )
        self._tokens += tokens
        self._saved[task.microbatch, task.chunk] = (received, output)
        passed_on: torch.Tensor = output.detach()
        if not is_last_stage:
            deallocate_output_tensor(output, self._core_config.deallocate_pipeline_outputs)
        return passed_on

    def backward(self, task: Task, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run a backward pass. Returns the gradient of the chunk's input; None on the first stage."""
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel.schedules import backward_step

        taken, output = self._saved.pop((task.microbatch, task.chunk))
        with self._stores[task.chunk].backward(task.microbatch, split=self._split):
            gradient: torch.Tensor | None = backward_step(
                taken, output, received, ModelType.encoder_or_decoder, self._core_config
            )
        return gradient

    def weight(self, task: Task) -> None:
        """Compute the weight gradients that the backward pass of the microbatch has left."""
        compute = self._stores[task.chunk].run
        if self._timers is None:
            compute(task.microbatch)
        else:
            self._timers.weight(task.chunk, task.microbatch, compute)

    def operand_bytes(self, chunk: int) -> int:
        """Return the bytes that pending weight tasks of a chunk keep."""
        return self._stores[chunk].retained_bytes

    def end_step(self) -> list[torch.Tensor]:
        """Reduce the gradients. Returns the reports of the loss by microbatch, on the last stage."""
        for store in self._stores:
            store.finish_step()
        if self._random is not None:
            self._random.end_step()
        per_token = self._tokens if self._core_config.calculate_per_token_loss else None
        if self._placement.shape is Shape.VEE:
            finalize_vee(self._core_config, self._chunks, self._groups, per_token)
        else:
            self._core_config.finalize_model_grads_func(self._chunks, per_token, pg_collection=self._groups)
        return [report for microbatch in sorted(self._reports) for report in self._reports[microbatch]]
