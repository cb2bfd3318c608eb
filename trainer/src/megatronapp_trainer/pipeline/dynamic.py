"""The schedule that runs the tasks of a step by a policy, over a transport for any order of transfers."""

import dataclasses

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.executor import run_tasks
from megatronapp_trainer.pipeline.leader import Following, Leading
from megatronapp_trainer.pipeline.megatron_schedules import StaticSchedule
from megatronapp_trainer.pipeline.plan_tuner import PlanTuner
from megatronapp_trainer.pipeline.planning.policies import Policy
from megatronapp_trainer.pipeline.planning.tasks import Placement
from megatronapp_trainer.pipeline.schedule import ScheduleContext
from megatronapp_trainer.pipeline.task_passes import TaskPasses
from megatronapp_trainer.pipeline.transport.inboxes import Inboxes, TaskAddresses
from megatronapp_trainer.pipeline.transport.shared_memory_transport import SharedMemoryTransport
from megatronapp_trainer.pipeline.transport.task_transport import ObservedTaskTransport, TaskTransport
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec


class DynamicSchedule:
    """Runs training steps as tasks; evaluations run their forward passes by megatron-core's schedule."""

    def __init__(self, context: ScheduleContext) -> None:
        """Connect the ranks of the pipeline; collective. Raises UsageError for what MegaDPP does not run yet."""
        layout = context.layout
        # Without the observer: it announces nothing, and the passes of tasks need the timers as they are.
        self._evaluation = StaticSchedule(dataclasses.replace(context, observer=None))
        self._layout = layout
        self._plan = _plan(context.config, layout)
        self._passes = TaskPasses(context, self._plan.placement, split=self._plan.split)
        self._transport = _connect(context, self._plan)
        group = parallel_state.get_pipeline_model_parallel_group()
        self._tuner = PlanTuner(self._plan, group, context.report) if self._plan.is_tuned else None
        self._task_transport: TaskTransport = self._transport
        if context.observer is not None:
            self._task_transport = ObservedTaskTransport(
                self._transport,
                context.observer.transfers,
                placement=self._plan.placement,
                rank=layout.pipeline_rank,
                pipeline=_pipeline_ranks(),
            )

    def train(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches and reduce the gradients.

        Raises:
            PeerLostError: another rank is lost or takes too long.
        """
        if self._tuner is not None:
            self._tuner.begin_step(num_microbatches)
        self._passes.begin_step(feed, num_microbatches)
        try:
            times = run_tasks(
                self._plan.placement,
                self._layout.pipeline_rank,
                num_microbatches,
                split=self._plan.split,
                policy=self._policy(num_microbatches),
                passes=self._passes,
                transport=self._task_transport,
            )
        except BaseException:
            self._transport.abort()  # so that ranks that wait for this one learn of the failure at once
            raise
        if self._tuner is not None:
            self._tuner.end_step(times)
        return self._passes.end_step()

    def evaluate(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run the forward passes alone, with no gradients and no spans."""
        return self._evaluation.evaluate(feed, num_microbatches)

    def close(self) -> None:
        """End the transport; what was sent is delivered first."""
        self._transport.close()

    def _policy(self, num_microbatches: int) -> Policy:
        if self._layout.tensor_rank > 0:
            return Following(self._transport)
        policy = self._plan.policy(self._layout.pipeline_rank, num_microbatches)
        return Leading(policy, self._transport) if self._layout.tensor_size > 1 else policy


def check_memory(config: TrainerConfig, layout: Layout) -> None:
    """Compare the shared memory of all ranks with what they need, before a model is built; collective over the world.

    Raises:
        UsageError: ranks of a pipeline or of a tensor group share no memory, or too little.
    """
    _inboxes(config, layout, _plan(config, layout)).agree()


def _connect(context: ScheduleContext, plan: DppPlan) -> SharedMemoryTransport:
    """Connect the ranks of this rank's pipeline and tensor group."""
    config = context.config
    return SharedMemoryTransport(
        _inboxes(config, context.layout, plan),
        threads=config.dpp.threads,
        deadline_s=60 * config.parallel.distributed_timeout_minutes,
    )


def _plan(config: TrainerConfig, layout: Layout) -> DppPlan:
    return DppPlan(config.dpp, Placement(layout.pipeline_size, layout.virtual_size))


def _inboxes(config: TrainerConfig, layout: Layout, plan: DppPlan) -> Inboxes:
    addresses = TaskAddresses(
        pipeline=_pipeline_ranks(),
        tensor=dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()),
    )
    length = config.model.seq_length
    if config.parallel.sequence_parallel:
        length //= layout.tensor_size
    shape = (length, config.training.micro_batch_size, config.model.hidden_size)
    most_microbatches = (
        config.global_batch_size(layout.data_size) // config.training.micro_batch_size // layout.data_size
    )
    dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
    return Inboxes(plan.placement, addresses, TensorSpec(shape, dtype), plan.peak_chunks(most_microbatches))


def _pipeline_ranks() -> list[int]:
    """Return the ranks of the world that hold this rank's pipeline, by pipeline rank."""
    ranks: list[int] = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return ranks
