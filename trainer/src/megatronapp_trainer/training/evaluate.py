"""Evaluation without effects on training: separate samples, restored random states."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatronapp_trainer.data.microbatches import BatchSource, HostMicrobatch, StepFeed, chunks_that_need_data
from megatronapp_trainer.models.language_model_loss import PendingLossReduction, reduce_loss
from megatronapp_trainer.pipeline.schedule import PipelineSchedule
from megatronapp_trainer.training.build import TrainingRun


def evaluate(
    run: TrainingRun,
    schedule: PipelineSchedule,
    source: BatchSource,
    iterator: Iterator[HostMicrobatch],
    *,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Return the mean loss per token over ``--eval-iters`` global batches, equal on all ranks; None if a rank was
    stopped.

    Ranks agree on stopping after each batch, and read the answer after they have launched the next one: the device
    never waits for it.
    """
    needed_by = chunks_that_need_data(run.config, run.layout)
    microbatches = run.batches.final // (run.batches.micro_batch_size * run.batches.data_size)
    reports: list[torch.Tensor] = []
    agreed: PendingLossReduction | None = None
    with untouched_training(run):
        for _ in range(run.config.logging.eval_iters):
            feed = StepFeed(source, iterator, microbatches, needed_by=needed_by, observer=None)
            reports += schedule.evaluate(feed, microbatches)
            if agreed is not None and agreed.read().stop:
                return None
            agreed = reduce_loss([], run.layout, run.device, stop=asked_to_stop())
    return reduce_loss(reports, run.layout, run.device).read().mean


@contextlib.contextmanager
def untouched_training(run: TrainingRun) -> Iterator[None]:
    """Turn dropout and timers off and keep parameters whole inside the context; restores all of it afterwards."""
    from megatron.core.tensor_parallel.random import _fork_rng

    timers, run.core_config.timers = run.core_config.timers, None
    with gathered_parameters(run), _fork_rng():
        for chunk in run.state.chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in run.state.chunks:
                chunk.train()
            run.core_config.timers = timers


@contextlib.contextmanager
def gathered_parameters(run: TrainingRun) -> Iterator[None]:
    """Let no parameter gather be pending or start inside the context; ``--overlap-param-gather`` defers them."""
    overlapped: list[Any] = run.state.chunks if run.config.parallel.overlap_param_gather else []
    for chunk in overlapped:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()
