"""The schedule that runs the tasks of a step by a policy, over a transport for any order of transfers."""

import dataclasses
from collections.abc import Iterable

import torch
from megatron.core import parallel_state

from megatronapp_common.names import ExitCode
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.pipeline.dpp import REACTION, DppPlan
from megatronapp_trainer.pipeline.executor import StepTasks, run_tasks
from megatronapp_trainer.pipeline.leader import Following, Leading
from megatronapp_trainer.pipeline.megatron_schedules import StaticSchedule, within_step
from megatronapp_trainer.pipeline.memory.measured_passes import MeasuredPasses, gather_measured
from megatronapp_trainer.pipeline.plan_tuner import PlanTuner
from megatronapp_trainer.pipeline.planning.lateness import LaunchRule, SenderWatch, UsualTimes
from megatronapp_trainer.pipeline.planning.policies import Policy
from megatronapp_trainer.pipeline.planning.report import PlanReport
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, Task
from megatronapp_trainer.pipeline.schedule import ScheduleContext
from megatronapp_trainer.pipeline.task_clocks import DeviceTaskClock, HostTaskClock, StepTimes, TaskClock
from megatronapp_trainer.pipeline.task_passes import TaskPasses
from megatronapp_trainer.pipeline.transport.inboxes import inboxes_of, pipeline_ranks
from megatronapp_trainer.pipeline.transport.shared_memory_transport import SharedMemoryTransport
from megatronapp_trainer.pipeline.transport.task_transport import ObservedTaskTransport, TaskTransport
from megatronapp_trainer.pipeline.vee.evaluation import TaskEvaluation


class DynamicSchedule:
    """Runs training steps as tasks, and evaluations by megatron-core's schedule; in a vee they are tasks, too."""

    def __init__(self, context: ScheduleContext) -> None:
        """Connect the ranks of the pipeline; collective. Raises UsageError for what MegaDPP does not run yet."""
        layout = context.layout
        self._layout = layout
        self._chunks = context.chunks
        self._report = context.report
        self._most_microbatches = context.config.most_microbatches(layout.data_size)
        self._plan = _plan(context.config, layout)
        self._passes = TaskPasses(context, self._plan.placement, split=self._plan.split)
        self._transport = _connect(context, self._plan)
        self._evaluation = self._evaluator(context)
        self._on_device = next(context.chunks[0].parameters()).is_cuda
        self._clock: TaskClock = DeviceTaskClock() if self._on_device else HostTaskClock()
        self._deadline_s = 60 * context.config.parallel.distributed_timeout_minutes
        self._times: StepTimes | None = None
        """Times of the step before, until the tuner has them."""
        self._is_captured = False
        """True if hooks have made that step longer: its times are no measure."""
        self._tasks = 0
        self._tuner = None
        if self._plan.is_tuned:
            group = parallel_state.get_pipeline_model_parallel_group()
            reaction = REACTION if self._on_device else None
            layers = _layers_of_rank(context.config)
            has_vee = context.config.model.type != "bert"
            self._tuner = PlanTuner(self._plan, group, context.report, reaction, layers_of_rank=layers, has_vee=has_vee)
        self._publish = context.publish_plan
        self._published: PlanReport | None = None
        self._task_transport: TaskTransport = self._transport
        if context.observer is not None:
            self._task_transport = ObservedTaskTransport(
                self._transport,
                context.observer.transfers,
                placement=self._plan.placement,
                rank=layout.pipeline_rank,
                pipeline=pipeline_ranks(),
            )

    def train(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches and reduce the gradients.

        Raises:
            PeerLostError: another rank is lost or takes too long.
        """
        usual = self._tune(num_microbatches)
        self._is_captured = feed.is_captured
        self._publish_plan(num_microbatches)
        rank = self._layout.pipeline_rank
        with self._passes.step(feed, num_microbatches, lambda: self._plan.slots(rank, num_microbatches)):
            self._passes.begin_step(feed, num_microbatches)
            self._run(num_microbatches, usual)
            return self._passes.end_step()

    def _run(self, num_microbatches: int, usual: UsualTimes | None) -> None:
        """Run the tasks of a step."""
        rank, placement = self._layout.pipeline_rank, self._plan.placement
        self._clock.begin_step({} if usual is None else usual.of_rank(rank))
        plan = StepTasks(
            placement=placement,
            rank=rank,
            num_microbatches=num_microbatches,
            split=self._plan.split,
            policy=self._policy(num_microbatches),
            first_number=self._tasks + 1,
            launch_rule=self._launch_rule(num_microbatches),
            deadline_s=self._deadline_s,
        )
        self._tasks += plan.tasks
        measured = MeasuredPasses(self._passes, self._chunks) if self._plan.measures_memory else None
        try:
            run_tasks(
                plan,
                passes=measured or self._passes,
                transport=self._task_transport,
                clock=self._clock,
                watch=SenderWatch(placement, rank, usual),
            )
        except BaseException:
            self._transport.abort()  # so that ranks that wait for this one learn of the failure at once
            raise
        if measured is not None:
            self._limit_memory(measured)

    def evaluate(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run the forward passes alone, with no gradients and no spans."""
        self._read_times()
        try:
            with within_step(self._passes.fp8_weights):
                return self._evaluation.evaluate(feed, num_microbatches)
        except BaseException:
            self._transport.abort()
            raise

    def _evaluator(self, context: ScheduleContext) -> StaticSchedule | TaskEvaluation:
        """Return what runs evaluations: megatron-core's schedule where its order of stages is that of the ranks."""
        if context.layout.is_vee:
            return TaskEvaluation(context, self._plan.placement, self._transport)
        # Without the observer: it announces nothing, and the passes of tasks need the timers as they are. Without the
        # optimizer: it computes no gradients, and must not install layers in the place of those of tasks.
        return StaticSchedule(dataclasses.replace(context, observer=None, optimizer=None))

    def _limit_memory(self, passes: MeasuredPasses) -> None:
        """Let the plan hold to its cap in bytes from the next step on; collective over the world."""
        layout = self._layout
        measured = gather_measured(passes.measured, layout.pipeline_rank, layout.pipeline_size)
        line = self._plan.limit_memory(measured, self._most_microbatches)
        if self._report is not None:
            self._report(line)

    def close(self, code: ExitCode = ExitCode.OK) -> None:
        """End the transport; what was sent is delivered first."""
        self._passes.close()
        self._transport.close()

    def _publish_plan(self, num_microbatches: int) -> None:
        """Publish the plan of the step that begins, with what is known of it, where it is another than before."""
        if self._publish is None:
            return
        report = self._plan.report(num_microbatches)
        choice = None if self._tuner is None else self._tuner.choices.get(num_microbatches)
        if self._tuner is not None and choice is not None:
            report = dataclasses.replace(
                report,
                is_chosen=True,
                simulated_seconds=choice.seconds,
                simulated_bubble=choice.bubble,
                static_seconds=choice.static_seconds,
                static_bubble=choice.static_bubble,
                measured_seconds=self._tuner.measured_seconds.get(num_microbatches),
            )
        if report != self._published:
            self._publish(report)
            self._published = report

    def _tune(self, num_microbatches: int) -> UsualTimes | None:
        """Hand the times of the step before to the tuner, and let it choose the plan; return the usual times.

        They are not known before: a device ends its tasks after the host has launched all of a step.
        """
        self._read_times()
        times, self._times = self._times, None
        if self._tuner is None:
            return None
        if times is not None:
            self._tuner.end_step(times)
        self._tuner.begin_step(num_microbatches)
        return self._tuner.usual

    def _read_times(self) -> None:
        """Read the times of the step before, while the transport has them."""
        times = self._clock.times()
        if times is not None and not self._is_captured:
            if self._on_device:
                times.received = self._received(time.task for time in times.tasks)
            else:
                times.transfers = self._transport.received_seconds()
            self._times = times

    def _received(self, tasks: Iterable[Task]) -> dict[Task, float]:
        """Return when the inputs of the step before were here; without those whose copies have no times yet."""
        placement, rank = self._plan.placement, self._layout.pipeline_rank
        sources = ((task, placement.previous_task(rank, task)) for task in tasks)
        copies = {task: self._transport.copied_ns(task) for task, source in sources if source and source.rank != rank}
        return {task: 1e-9 * copy[1] for task, copy in copies.items() if copy is not None}

    def _launch_rule(self, num_microbatches: int) -> LaunchRule | None:
        if not self._on_device:
            return None
        tolerance = self._plan.tolerance_seconds(num_microbatches)
        return LaunchRule(lead_seconds=REACTION.lead_seconds, tolerance_seconds=tolerance)

    def _policy(self, num_microbatches: int) -> Policy:
        layout = self._layout
        if layout.tensor_rank > 0 or layout.context_rank > 0:
            return Following(self._transport)
        policy = self._plan.policy(layout.pipeline_rank, num_microbatches)
        return Leading(policy, self._transport) if layout.tensor_size * layout.context_size > 1 else policy


def check_memory(config: TrainerConfig, layout: Layout) -> None:
    """Compare the shared memory of all ranks with what they need, before a model is built; collective over the world.

    Raises:
        UsageError: too little shared memory.
    """
    inboxes_of(config, layout, _plan(config, layout)).agree()


def _connect(context: ScheduleContext, plan: DppPlan) -> SharedMemoryTransport:
    """Connect the ranks of this rank's pipeline and tensor group."""
    config = context.config
    return SharedMemoryTransport(
        inboxes_of(config, context.layout, plan),
        threads=config.dpp.threads,
        deadline_s=60 * config.parallel.distributed_timeout_minutes,
    )


def _layers_of_rank(config: TrainerConfig) -> int | None:
    """Return the number of layers of each pipeline rank; None where ranks may have different numbers."""
    layers = config.parallel.stage_layers(config.model.num_layers)
    return None if config.parallel.counted_as_layers or len(set(layers)) > 1 else layers[0]


def _plan(config: TrainerConfig, layout: Layout) -> DppPlan:
    shape = Shape.VEE if layout.is_vee else Shape.LOOP
    return DppPlan(config.dpp, Placement(layout.pipeline_size, layout.virtual_size, shape))
