"""Forward and backward passes of one step through megatron-core's schedules."""

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch

from megatronapp_common.names import ExitCode
from megatronapp_trainer.config.rules.graphs import uses_slots
from megatronapp_trainer.data.microbatches import ChunkFeed, StepFeed
from megatronapp_trainer.models.kernels.fp8 import layers_in_fp8
from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weights
from megatronapp_trainer.models.registry import ModelFamily
from megatronapp_trainer.parallel.groups import schedule_groups
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.transport import Transport
from megatronapp_trainer.pipeline.graphs.choice import pass_recorders
from megatronapp_trainer.pipeline.graphs.graphed_step import GraphedStep
from megatronapp_trainer.pipeline.graphs.replayed_passes import ReplayedPasses
from megatronapp_trainer.pipeline.graphs.slots import SlotLimits, slots_of_order
from megatronapp_trainer.pipeline.pass_timers import PassTimers
from megatronapp_trainer.pipeline.planning.orders import interleaved
from megatronapp_trainer.pipeline.planning.tasks import Placement
from megatronapp_trainer.pipeline.schedule import ScheduleContext

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class ForwardStep:
    """The forward step that the schedules call: data, model, and the loss to apply if this is the last chunk."""

    def __init__(self, family: ModelFamily, timers: PassTimers | None) -> None:
        self._family = family
        self._timers = timers

    def __call__(self, feed: ChunkFeed, model: Any) -> tuple[torch.Tensor, LossFunction]:  # noqa: ANN401 - DDP
        """Run one microbatch through one chunk."""
        batch = feed.next()
        self.announce(feed, model)
        return self.compute(model, batch)

    def announce(self, feed: ChunkFeed, model: Any) -> None:  # noqa: ANN401 - DDP
        """Announce the pass whose data has been read."""
        if self._timers is not None:
            if feed.is_first and model.use_forward_hook:
                self._timers.gather(lambda: _await_first_parameters(model))
            self._timers.begin_forward(feed.chunk, feed.microbatch)

    def compute(self, model: Any, batch: Any | None) -> tuple[torch.Tensor, LossFunction]:  # noqa: ANN401 - DDP, microbatch
        """Run a microbatch through a chunk. Returns its output, and the loss to apply if this is the last chunk."""
        output = self._family.forward(model, batch)
        if batch is None:
            return output, _no_loss
        return output, lambda losses: self._family.loss(losses, batch)


def _await_first_parameters(model: Any) -> None:  # noqa: ANN401 - DDP
    """Wait for the parameter gather of the chunk's first module, under ``--overlap-param-gather``.

    The hook before that module would do so a moment later. No computation has begun yet, so this gather is waited for
    in full, and its span need not be inside FORWARD. The hook then finds it finished.
    """
    first = next(model.module.parameters())
    skip_next = model.ddp_config.align_param_gather or model.overlap_param_gather_with_optimizer_step
    model.param_to_bucket_group[first].finish_param_sync(skip_next_bucket_dispatch=skip_next)


def _no_loss(_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise AssertionError("a chunk without labels was asked for a loss")


class StaticSchedule:
    """1F1B or interleaved 1F1B, or plain gradient accumulation on one stage."""

    def __init__(self, context: ScheduleContext) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._config = context.config
        self._layout = context.layout
        self._chunks = context.chunks
        self._forward_backward = get_forward_backward_func()
        self._graphed: GraphedStep | None = None
        self._replayed: ReplayedPasses | None = None
        self._fp8_weights: Fp8Weights | None = None
        if context.optimizer is not None:
            connect_gradients(context)
            self._fp8_weights = fp8_weights_of(context)
            _fuse_gradients(context, self._fp8_weights)
        self._timers = install_pass_timers(context)
        self._forward_step = ForwardStep(context.family, self._timers)
        self._plain_forward_step = ForwardStep(context.family, None)
        recorders = None if context.optimizer is None else pass_recorders(context)
        if recorders is not None and uses_slots(context.config):
            self._replayed = ReplayedPasses(context, self._forward_step, recorders, fp8_weights=self._fp8_weights)
        elif recorders is not None:
            self._graphed = GraphedStep(
                context,
                self._forward_step,
                self._plain_forward_step,
                recorders,
                timers=self._timers,
                fp8_weights=self._fp8_weights,
            )
        self._transport = _transport_options(context.transport, context.core_config)
        self._shared_transport = context.evaluation_transport
        self._evaluation_transport = _transport_options(context.evaluation_transport, context.core_config)

    def train(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches; gradients are reduced. Returns reports on the last stage."""
        with within_step(self._fp8_weights):
            return self._train(feed, num_microbatches)

    def _train(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        if self._graphed is not None:
            return self._graphed.train(feed, num_microbatches)
        if self._timers is not None:
            self._timers.begin_step(backward_order(self._layout, num_microbatches))
        if self._replayed is None:
            return self._run(feed, num_microbatches, self._forward_step, forward_only=False, **self._transport)
        with self._replayed.step(feed, num_microbatches, lambda: _slot_limits(self._layout, num_microbatches)):
            return self._run(feed, num_microbatches, self._replayed, forward_only=False, **self._transport)

    @torch.no_grad()
    def evaluate(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run forward passes only, without spans."""
        options = self._evaluation_transport
        with within_step(self._fp8_weights):
            return self._run(feed, num_microbatches, self._plain_forward_step, forward_only=True, **options)

    def close(self, code: ExitCode = ExitCode.OK) -> None:
        """End the transport; what was sent is delivered first."""
        if self._replayed is not None:
            self._replayed.close()
        if self._shared_transport is not None:
            self._shared_transport.close()

    def _run(
        self,
        feed: StepFeed,
        num_microbatches: int,
        step: ForwardStep | ReplayedPasses,
        **options: Any,  # noqa: ANN401 - of megatron-core's schedules
    ) -> list[torch.Tensor]:
        feeds = [ChunkFeed(feed, chunk) for chunk in range(len(self._chunks))]
        single = len(self._chunks) == 1
        try:
            reports = self._forward_backward(
                forward_step_func=step,
                data_iterator=feeds[0] if single else feeds,
                model=self._chunks[0] if single else self._chunks,
                num_microbatches=num_microbatches,
                seq_length=self._config.model.seq_length,
                micro_batch_size=self._config.training.micro_batch_size,
                **options,
            )
        except BaseException:
            if self._shared_transport is not None:
                self._shared_transport.close(drain=False)  # so that ranks that wait for this one learn of it at once
            raise
        return cast("list[torch.Tensor]", reports)


def _slot_limits(layout: Layout, num_microbatches: int) -> SlotLimits:
    placement = Placement(layout.pipeline_size, layout.virtual_size)
    return slots_of_order(interleaved(placement, num_microbatches, layout.pipeline_rank), layout.virtual_size)


def backward_order(layout: Layout, num_microbatches: int) -> tuple[tuple[int, int], ...]:
    """Return (chunk, microbatch) of each backward pass of a step on this rank, in the order of the schedule."""
    if layout.virtual_size == 1:
        return tuple((0, microbatch) for microbatch in range(num_microbatches))
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(num_microbatches, layout.virtual_size, layout.pipeline_size)
    return tuple((layout.virtual_size - 1 - chunk, microbatch) for microbatch, chunk in table)


def install_pass_timers(context: ScheduleContext) -> PassTimers | None:
    """Let megatron-core announce its passes to the observer; returns None without an observer."""
    if context.observer is None:
        return None
    timers = PassTimers(context.observer, context.core_config.timers)
    context.core_config.timers = timers
    return timers


def fp8_weights_of(context: ScheduleContext) -> Fp8Weights | None:
    """Return the memory for weights in 8 bits; None if no layer multiplies in them. Errors as of `layers_in_fp8`."""
    layers = layers_in_fp8(context.config, next(context.chunks[0].parameters()).device)
    return Fp8Weights(layers) if layers else None


def within_step(fp8_weights: Fp8Weights | None) -> contextlib.AbstractContextManager[None]:
    """Return the context of a step or an evaluation, in which weights in 8 bits are rounded once."""
    return contextlib.nullcontext() if fp8_weights is None else fp8_weights.constant()


def _fuse_gradients(context: ScheduleContext, fp8_weights: Fp8Weights | None) -> None:
    # Imported late: megatron-core must not be imported before `prepare_device` has chosen how.
    from megatronapp_trainer.pipeline.split_backward import (
        fused_gradients,
        install_direct_gradients,
        uses_small_kernels,
    )

    if (gradients := fused_gradients(context)) is not None:
        install_direct_gradients(
            context.chunks,
            sum_rows=gradients,
            embedding_rows=uses_small_kernels(context.config),
            fp8_weights=fp8_weights,
        )
    elif fp8_weights is not None:
        install_direct_gradients(context.chunks, fused=False, fp8_weights=fp8_weights)


def connect_gradients(context: ScheduleContext) -> None:
    """Set how megatron-core's configuration scales losses and reduces gradients, as its schedules expect."""
    from megatron.core.distributed import finalize_model_grads

    core_config = context.core_config
    core_config.finalize_model_grads_func = finalize_model_grads
    core_config.grad_scale_func = context.optimizer.scale_loss
    if context.config.parallel.overlap_grad_reduce:
        core_config.no_sync_func = _single_or_list([chunk.no_sync for chunk in context.chunks])
        core_config.grad_sync_func = _single_or_list([chunk.start_grad_sync for chunk in context.chunks])


def _single_or_list(functions: list[Any]) -> Any:  # noqa: ANN401 - what megatron-core takes
    return functions[0] if len(functions) == 1 else functions


def _transport_options(transport: Transport | None, core_config: Any) -> dict[str, Any]:  # noqa: ANN401 - untyped library
    """Return the arguments of megatron-core's schedules for a transport; they require the groups with it."""
    if transport is None:
        return {}
    from megatronapp_trainer.pipeline.megatron_transport import TransportCommunicator

    groups = schedule_groups()
    return {
        "p2p_communicator": TransportCommunicator(groups.pp, core_config, transport),
        "pg_collection": groups,
    }
