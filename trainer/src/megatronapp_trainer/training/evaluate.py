"""Evaluation without effects on training: separate samples, restored random states."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.data.microbatches import (
    DataIterators,
    HostMicrobatch,
    MicrobatchSource,
    StepFeed,
    ValidationSet,
)
from megatronapp_trainer.models.language_model_loss import PendingLossReduction, StepLoss, reduce_loss
from megatronapp_trainer.pipeline.schedule import PipelineSchedule
from megatronapp_trainer.training.build import TrainingRun
from megatronapp_trainer.training.loop_context import LoopContext

_REPORTS = 4096
"""Reports of microbatches that are summed at once."""


class Evaluator:
    """Evaluates when it is due, and knows which evaluation has ended."""

    def __init__(self, context: LoopContext, iterators: DataIterators) -> None:
        self._context = context
        self._config = context.run.config
        self._state = context.run.state
        self._monitor = context.monitor
        self._iterators = iterators
        self._validated_iteration = -1

    def mark_due(self) -> None:
        """Note in the state if an evaluation is due after the last step."""
        self._state.validation_due = self._validates() and is_due(
            self._state.iteration, self._config.logging.eval_interval
        )

    def finish_interrupted(self) -> bool:
        """Run the evaluation that was due when the previous run was stopped; False if a stop ends it early.

        Megatron-LM evaluates before it stops. Here a stop does not wait, and the restart evaluates: no point is lost.
        """
        due = self._state.validation_due and self._state.iteration < self._config.training.train_iters
        return not (due and self._validates()) or self.run("validation")

    def run_final(self) -> bool:
        """Run the evaluations after training, on both splits; False if a stop ends them early."""
        if not self._config.logging.eval_iters:
            return True
        validated = self._validated_iteration == self._state.iteration
        return (validated or self.run("validation")) and self.run("test")

    def run(self, split: str) -> bool:
        """Evaluate a split; False if a stop of any rank ends it early."""
        sets = self._sets(split)
        if not sets:
            return True
        self._monitor.publish_state("evaluating")
        if self._config.training.manual_gc and self._config.training.manual_gc_eval:
            self._monitor.collect_garbage()
        with self._monitor.span(RecordKind.EVALUATE):
            losses = self._losses(sets)
        if losses is not None:
            if split == "validation":
                self._validated_iteration = self._state.iteration
                self._state.validation_due = False
            self._monitor.evaluated(split, losses)
        self._monitor.publish_state("training")
        return losses is not None

    def _losses(self, sets: Sequence[ValidationSet]) -> dict[str, StepLoss] | None:
        """Return the losses of each set; None if a stop of any rank ends the evaluation early."""
        context, found = self._context, {}
        for part in sets:
            loss = evaluate(
                context.run,
                context.schedule,
                context.source,
                part.iterator,
                global_batches=part.global_batches,
                stop_requested=lambda: context.stop_request.requested,
            )
            if loss is None:
                return None
            found[part.name] = loss
        return found

    def _sets(self, split: str) -> tuple[ValidationSet, ...]:
        """Return the data of a split; several sets only of validation."""
        data, batches = self._iterators, self._config.logging.eval_iters
        if split == "validation" and data.valid_sets:
            return data.valid_sets
        iterator = data.valid if split == "validation" else data.test
        return () if iterator is None else (ValidationSet(name="", iterator=iterator, global_batches=batches),)

    def _validates(self) -> bool:
        return self._config.logging.eval_iters > 0 and bool(self._sets("validation"))


def is_due(iteration: int, interval: int | None) -> bool:
    """Return True every `interval` steps; None: never."""
    return interval is not None and iteration % interval == 0


def evaluate(
    run: TrainingRun,
    schedule: PipelineSchedule,
    source: MicrobatchSource,
    iterator: Iterator[HostMicrobatch],
    *,
    global_batches: int | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> StepLoss | None:
    """Return the mean losses over global batches (None: ``--eval-iters``), equal on all ranks; None if a rank was
    stopped.

    Ranks agree on stopping after each batch, and read the answer after they have launched the next one: the device
    never waits for it.
    """
    microbatches = run.batches.final // (run.batches.micro_batch_size * run.batches.data_size)
    reports: list[torch.Tensor] = []
    total: torch.Tensor | None = None
    agreed: PendingLossReduction | None = None
    with untouched_training(run):
        for _ in range(run.config.logging.eval_iters if global_batches is None else global_batches):
            feed = StepFeed(source, iterator, microbatches, observer=None)
            reports += schedule.evaluate(feed, microbatches)
            if len(reports) >= _REPORTS:  # a whole set may have millions of microbatches
                total = sum_of_reports(reports, total)
                reports = []
            if agreed is not None and agreed.read().stop:
                return None
            agreed = reduce_loss([], run.layout, run.device, names=run.loss_names, stop=stop_requested())
    if total is not None:
        reports = [sum_of_reports(reports, total)]
    reduction = reduce_loss(reports, run.layout, run.device, names=run.loss_names, minimised=run.minimised_losses)
    return reduction.read()


def sum_of_reports(reports: Sequence[torch.Tensor], total: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of reports [N] and of what was summed before, in fp64."""
    parts = [report.double() for report in reports]
    return torch.stack(parts if total is None else [total, *parts]).sum(0)


@contextlib.contextmanager
def untouched_training(run: TrainingRun) -> Iterator[None]:
    """Turn dropout and timers off and keep parameters whole inside the context; restores all of it afterwards.

    Attention has the kernels of training.
    """
    from megatron.core.tensor_parallel.random import _fork_rng

    timers, run.core_config.timers = run.core_config.timers, None
    with gathered_parameters(run), run.attention(), _fork_rng():
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
