"""Construction of a training run: device, groups, model, optimizer, schedules, data."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.checkpoint.train_state import TrainState
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.config.batch_size import BatchSchedule, batch_schedule
from megatronapp_trainer.config.checks import check_world
from megatronapp_trainer.config.rules.graphs import overlaps_by_default
from megatronapp_trainer.data.microbatches import DataIterators
from megatronapp_trainer.device import Device
from megatronapp_trainer.hooks.step_observer import ObserverTimers, StepObserver
from megatronapp_trainer.models.attention_backends import attention_backends
from megatronapp_trainer.models.registry import model_family
from megatronapp_trainer.parallel.layout import Layout, environment_integer, layout_from_environment
from megatronapp_trainer.parallel.node_flags import check_node_flags
from megatronapp_trainer.parallel.seeds import seed_everything
from megatronapp_trainer.parallel.transport import Transport
from megatronapp_trainer.pipeline.planning.report import PlanReport
from megatronapp_trainer.pipeline.registry import create_schedule
from megatronapp_trainer.pipeline.schedule import PipelineSchedule, ScheduleContext
from megatronapp_trainer.training.learning_rate import build_scheduler
from megatronapp_trainer.training.optimizer import build_optimizer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """A run that is ready to train: its constants, and the state that steps change."""

    config: TrainerConfig
    layout: Layout
    device: Device
    core_config: Any
    """megatron-core's TransformerConfig of all chunks."""
    batches: BatchSchedule
    padded_vocab_size: int
    state: TrainState

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Return the names of the losses that a report of a microbatch sums."""
        family = model_family(self.config)
        return (*family.LOSSES, *family.further_losses(self.config))

    @property
    def minimised_losses(self) -> int:
        """Return how many of `loss_names`, the first ones, are minimised."""
        return len(model_family(self.config).LOSSES)

    def attention(self) -> contextlib.AbstractContextManager[None]:
        """Choose the kernels of attention of the passes inside."""
        return attention_backends(self.config, self.device)


def layout_of(config: TrainerConfig) -> Layout:
    """Return this process's layout. Raises UsageError if ranks, batch, or flags about nodes do not fit it."""
    fbd = config.fbd_world(environment_integer("WORLD_SIZE", 1))
    layout = layout_from_environment(
        tensor_size=config.parallel.tensor_model_parallel_size,
        pipeline_size=config.parallel.pipeline_model_parallel_size,
        virtual_size=config.virtual_size,
        is_vee=config.is_vee,
        context_size=config.parallel.context_parallel_size,
        expert_size=config.parallel.expert_model_parallel_size,
        fbd=fbd,
    )
    check_world(config, layout.trained_data_size)
    check_node_flags(config.dpp, layout, os.environ)
    return layout


def with_overlap(config: TrainerConfig, layout: Layout, device: Device) -> TrainerConfig:
    """Return the configuration with the flags of overlapped transfers, where a run has them by default.

    Weights in 8 bits are rounded from whole ones, before the first graph: their gathers are not overlapped by default.
    Of two replicas the collective takes the mean of gradients itself, which is then exact. Of more, NCCL may add them
    up in the switch between GPUs, which takes no means.
    """
    if not device.is_cuda or not overlaps_by_default(config, data_size=layout.data_size):
        return config
    gathers = config.parallel.use_distributed_optimizer and config.precision.fp8_format is None
    log.info(
        "data parallelism: gradients are reduced%s during passes (--no-overlap-data-parallel: between steps)",
        " and parameters gathered" if gathers else "",
    )
    averages = layout.data_size == 2 and not config.training.calculate_per_token_loss
    parallel = dataclasses.replace(
        config.parallel,
        overlap_grad_reduce=True,
        overlap_param_gather=gathers,
        ddp_average_in_collective=averages or config.parallel.ddp_average_in_collective,
    )
    return dataclasses.replace(config, parallel=parallel)


def build_run(
    config: TrainerConfig, layout: Layout, device: Device, *, vocab_size: int, drawn: bool = True
) -> TrainingRun:
    """Build model, optimizer and schedules with their initial values; the groups exist already.

    A rank that only runs forward passes has neither optimizer nor learning-rate schedule.

    `drawn`: with initial weights; if false, with uninitialised memory, for a checkpoint to fill.
    """
    seed_everything(config, layout)
    core_config, chunks = model_family(config).build_chunks(config, layout, device, vocab_size=vocab_size, drawn=drawn)
    batches = batch_schedule(config, layout.trained_data_size)
    optimizer = scheduler = None
    if layout.role.has_optimizer:
        optimizer = build_optimizer(config, chunks)
        scheduler = build_scheduler(config, optimizer, batches)
    return TrainingRun(
        config=config,
        layout=layout,
        device=device,
        core_config=core_config,
        batches=batches,
        padded_vocab_size=config.model.padded_vocab_size(vocab_size),
        state=TrainState(chunks=chunks, optimizer=optimizer, scheduler=scheduler),
    )


def build_schedule(
    run: TrainingRun,
    observer: StepObserver | None = None,
    *,
    report: Callable[[str], None] | None = None,
    publish_plan: Callable[[PlanReport], None] | None = None,
) -> PipelineSchedule:
    """Create the pipeline schedule of a run, and connect the timers and the transport of an observer.

    `report` takes a line of text for the log, `publish_plan` the plan of later steps; None on ranks that do not report.
    """
    transport: Transport | None = None
    # Imported late: megatron-core must not be imported before `prepare_device` has chosen how.
    if run.config.dpp.replaces_transfers:
        from megatronapp_trainer.pipeline.transport.stage_transport import connect_stages

        transport = connect_stages(run.config, run.layout)
    elif run.layout.pipeline_size > 1:
        transport = _stage_transport(run)
    observed_transport = transport
    if observer is not None:
        observe_megatron(run, observer)
        if transport is not None:
            observed_transport = observer.wrap_transport(transport)
    context = ScheduleContext(
        config=run.config,
        layout=run.layout,
        core_config=run.core_config,
        chunks=run.state.chunks,
        optimizer=run.state.optimizer,
        transport=observed_transport,
        evaluation_transport=transport,
        family=model_family(run.config),
        observer=observer,
        report=report,
        publish_plan=publish_plan,
    )
    return create_schedule(run.config.schedule, context)


def _stage_transport(run: TrainingRun) -> Transport:
    """Return the transport of torch.distributed between the stages of a run."""
    from megatron.core import parallel_state

    from megatronapp_trainer.pipeline.megatron_transport import MegatronTransport
    from megatronapp_trainer.pipeline.transport.host_transport import HostTransport

    group = parallel_state.get_pipeline_model_parallel_group()
    if run.device.is_cuda and dist.get_backend(group) == "gloo":
        return HostTransport(group, run.core_config.pipeline_dtype, run.device.torch_device)
    return MegatronTransport(group, run.core_config)


def observe_megatron(run: TrainingRun, observer: StepObserver) -> None:
    """Let megatron-core's timers of a run announce their spans to an observer."""
    timers, optimizer = ObserverTimers(observer), run.state.optimizer
    run.core_config.timers = timers
    if optimizer is not None:
        optimizer.config.timers = timers
        optimizer.get_grad_norm = timers.timed(RecordKind.GRAD_NORM, optimizer.get_grad_norm)


def vocab_size_of(config: TrainerConfig) -> int:
    """Return the tokens before padding: the flag's, or the tokenizer's. Raises UsageError without both."""
    if config.data.vocab_size is not None:
        return config.data.vocab_size
    from megatronapp_trainer.data.iterators import vocabulary_size

    return vocabulary_size(config)


def build_iterators(
    config: TrainerConfig,
    layout: Layout,
    consumed_samples: int,
    *,
    order_samples: int | None = None,
    stream_state: str | None = None,
) -> DataIterators:
    """Return the microbatches of this rank from the given sample on; `order_samples` and `stream_state` as in
    `TrainState`.
    """
    return model_family(config).build_iterators(
        config, layout, consumed_samples, order_samples=order_samples, stream_state=stream_state
    )
