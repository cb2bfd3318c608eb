"""Evaluations of a model whose stages are placed in a vee, which megatron-core's schedules cannot run."""

import torch

from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.parallel.groups import schedule_groups
from megatronapp_trainer.pipeline.megatron_schedules import ForwardStep
from megatronapp_trainer.pipeline.planning.orders import forward_vee
from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind
from megatronapp_trainer.pipeline.schedule import ScheduleContext
from megatronapp_trainer.pipeline.task_passes import TaskFeed
from megatronapp_trainer.pipeline.transport.task_transport import TaskTransport


class TaskEvaluation:
    """Runs the forward tasks of an evaluation in a fixed order, the same on all ranks of a tensor group."""

    def __init__(self, context: ScheduleContext, placement: Placement, transport: TaskTransport) -> None:
        """Take the chunks of a run; `transport` is shared with training, whose steps and evaluations alternate."""
        self._chunks = context.chunks
        self._core_config = context.core_config
        self._placement = placement
        self._rank = context.layout.pipeline_rank
        self._transport = transport
        self._cp_size = schedule_groups().cp.size()
        self._forward_step = ForwardStep(context.family, None)

    @torch.no_grad()
    def evaluate(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run the forward passes of a batch. Returns the reports of the loss by microbatch, on the last stage.

        Raises:
            PeerLostError: another rank is lost or takes too long.
        """
        reports: list[torch.Tensor] = []
        inputs: dict[Task, torch.Tensor] = {}
        order = forward_vee(self._placement, num_microbatches, self._rank)
        self._transport.begin_step(task for task in order if self._is_received(task))
        for task in order:
            while task not in inputs and self._placement.stage(self._rank, task.chunk) > 0:
                inputs.update(self._transport.poll())
                if task not in inputs:
                    self._transport.wait()
            output = self._forward(task, feed, num_microbatches, inputs.pop(task, None), reports)
            target = self._placement.next_task(self._rank, task)
            if target is None or target.task.kind is not TaskKind.FORWARD:
                continue
            if target.rank == self._rank:
                inputs[target.task] = output
            else:
                self._transport.send(target, output)
        return reports

    def _is_received(self, task: Task) -> bool:
        source = self._placement.previous_task(self._rank, task)
        return source is not None and source.rank != self._rank

    def _forward(
        self,
        task: Task,
        feed: StepFeed,
        num_microbatches: int,
        received: torch.Tensor | None,
        reports: list[torch.Tensor],
    ) -> torch.Tensor:
        from megatron.core.pipeline_parallel.schedules import forward_step

        output: torch.Tensor
        output, _ = forward_step(
            self._forward_step,
            TaskFeed(feed, task, is_first=task.microbatch == 0),
            self._chunks[task.chunk],
            num_microbatches,
            received,
            reports,
            self._core_config,
            cp_group_size=self._cp_size,
            is_first_microbatch=task.microbatch == 0,
            current_microbatch=task.microbatch,
            vp_stage=task.chunk,
            is_last_stage=self._placement.stage(self._rank, task.chunk) == self._placement.stages - 1,
        )
        return output
