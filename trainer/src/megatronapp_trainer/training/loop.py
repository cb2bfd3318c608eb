"""The training loop: steps, and the work at step boundaries."""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from megatronapp_common.names import UNSAVED_STOP, ExitCode
from megatronapp_common.trace import NO_MICROBATCH, RecordKind
from megatronapp_trainer.checkpoint.train_state import TrainState
from megatronapp_trainer.data.microbatches import BatchSource, DataIterators, StepFeed, chunks_that_need_data
from megatronapp_trainer.errors import UnsavedStopError
from megatronapp_trainer.hooks.step_observer import StepMetrics, StepObserver
from megatronapp_trainer.models.language_model_loss import (
    PendingLossReduction,
    StepLoss,
    reduce_loss,
    refuse_infinite_gradients,
    refuse_not_finite,
)
from megatronapp_trainer.pipeline.schedule import PipelineSchedule
from megatronapp_trainer.training.build import TrainingRun
from megatronapp_trainer.training.evaluate import evaluate, gathered_parameters
from megatronapp_trainer.training.metrics import flops_per_token, peak_tflops, why_no_mfu
from megatronapp_trainer.training.optimizer import learning_rate
from megatronapp_trainer.training.progress import Reporter
from megatronapp_trainer.training.signals import StopRequest


class CheckpointSaver(Protocol):
    """Method that the loop uses of the checkpoint manager."""

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of this state; collective. Raises StorageError."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Result of a step, before it is reported."""

    loss: StepLoss
    grad_norm: float | None
    skipped: bool
    batch_size: int
    elapsed_s: float


class Trainer:
    """Runs steps until the training ends, a stop is requested, or a loss is not finite."""

    def __init__(
        self,
        run: TrainingRun,
        iterators: DataIterators,
        schedule: PipelineSchedule,
        *,
        stop_wish: StopRequest,
        reporter: Reporter | None = None,
        checkpoints: CheckpointSaver | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self._run = run
        self._config = run.config
        self._state = run.state
        self._iterators = iterators
        self._stop_wish = stop_wish
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._observer = observer
        self._source = BatchSource(run.config, run.layout, run.device)
        self._needed_by = chunks_that_need_data(run.config, run.layout)
        self._schedule = schedule
        self._pending: PendingLossReduction | None = None
        run.state.optimizer.get_grad_norm = self._refusing_not_finite(run.state.optimizer.get_grad_norm)
        self._flops = flops_per_token(run.config.model, run.padded_vocab_size)
        self._peak_tflops = peak_tflops(run.device.name, bf16=run.config.precision.bf16)
        self._began_s = time.monotonic()
        self._saved_iteration = run.state.iteration
        self._validated_iteration = -1

    def train(self) -> ExitCode:
        """Train to the end, or until asked to stop.

        Raises:
            NotFiniteError: a loss or gradient is NaN or Inf.
            UnsavedStopError: asked to stop where no checkpoint can be written.
            Exception: any error of data, checkpoints and collectives.
        """
        with self._collected_garbage():
            self._publish_state("training")
            self._explain_missing_mfu()
            if not self._validate_what_a_stop_left():
                return self._stop()
            while self._state.iteration < self._config.training.train_iters:
                outcome = self.step()
                if (code := self._at_boundary(outcome)) is not None:
                    return code
        return self._finish()

    def test(self) -> ExitCode:
        """Evaluate on validation and test data after training, if there are any.

        A stop ends it early: as a preemption if a restart would evaluate again, without training again.
        """
        if not self._evaluate_at_the_end():
            restarts_here = self._checkpoints is not None or self._config.logging.skip_train
            return ExitCode.PREEMPTED if restarts_here else ExitCode.OK
        self._publish_state("done")
        return ExitCode.OK

    def _evaluate_at_the_end(self) -> bool:
        """Run both evaluations; returns False if a stop ended them early."""
        if not self._config.logging.eval_iters:
            return True
        validated = self._validated_iteration == self._state.iteration
        return (validated or self._evaluate("validation")) and self._evaluate("test")

    def step(self) -> StepOutcome:
        """Run one optimizer step."""
        began_s, observer = time.perf_counter(), self._observer
        if observer is not None:
            observer.step_begin(self._state.iteration)
        microbatches = self._run.batches.num_microbatches(self._state.consumed_samples)
        self._pending = pending = self._forward_backward(microbatches)
        succeeded, norm, _ = self._state.optimizer.step()  # computes the norm even where nothing is clipped
        grad_norm = None if norm is None else float(norm)
        batch_size = microbatches * self._run.batches.micro_batch_size * self._run.batches.data_size
        loss = pending.read()
        self._advance(batch_size, succeeded=succeeded)
        outcome = StepOutcome(
            loss=loss,
            grad_norm=grad_norm,
            skipped=not succeeded,
            batch_size=batch_size,
            elapsed_s=time.perf_counter() - began_s,
        )
        self._report(outcome)
        return outcome

    def _forward_backward(self, microbatches: int) -> PendingLossReduction:
        for chunk in self._state.chunks:
            chunk.zero_grad_buffer()
        self._state.optimizer.zero_grad()
        feed = StepFeed(
            self._source, self._iterators.train, microbatches, needed_by=self._needed_by, observer=self._observer
        )
        reports = self._schedule.train(feed, microbatches)
        with self._span(RecordKind.LOSS_REDUCE):
            return reduce_loss(
                reports,
                self._run.layout,
                self._run.device,
                stop=self._stop_wish.requested,
                time_is_up=self._time_is_up(),
            )

    def _refusing_not_finite(self, gradient_norm: Callable[[], float]) -> Callable[[], float]:
        """Return the norm, which the optimizer requests before it changes a weight; refuses a step that is not finite.

        The host has the loss by then: its reduction was queued before the norm, which the host has waited for.
        """

        def checked() -> float:
            norm = gradient_norm()
            if self._config.training.check_for_nan and self._pending is not None:
                step = self._state.iteration
                refuse_not_finite(self._pending.read(), self._pending, self._run.layout, step=step)
                refuse_infinite_gradients(norm, step=step)
            return norm

        return checked

    def _advance(self, batch_size: int, *, succeeded: bool) -> None:
        self._state.iteration += 1
        self._state.consumed_samples += batch_size
        if succeeded:
            self._state.scheduler.step(increment=batch_size)
        else:
            self._state.skipped_iterations += 1

    def _at_boundary(self, outcome: StepOutcome) -> ExitCode | None:
        """Do the work that is due between two steps; an exit code ends the training."""
        iteration, config = self._state.iteration, self._config
        if config.training.manual_gc and _due(iteration, config.training.manual_gc_interval or None):
            self._collect_garbage()
        self._state.validation_due = self._validates() and _due(iteration, config.logging.eval_interval)
        if outcome.loss.stop and iteration < config.training.train_iters:  # after the last step all is done
            return self._stop()
        stopped = self._state.validation_due and not self._evaluate("validation")
        if _due(iteration, config.checkpoint.save_interval):
            self._save()
        if stopped and iteration < config.training.train_iters:
            return self._stop()
        if outcome.loss.time_is_up or _due(iteration, config.training.exit_interval):
            return self._finish()
        return None

    def _validates(self) -> bool:
        return self._config.logging.eval_iters > 0 and self._iterators.valid is not None

    def _validate_what_a_stop_left(self) -> bool:
        """Run the evaluation that was due when the previous run was stopped; True unless a stop ends it early.

        Megatron-LM evaluates before it stops. Here a stop does not wait, and the restart evaluates: no point is lost.
        """
        due = self._state.validation_due and self._state.iteration < self._config.training.train_iters
        return not (due and self._validates()) or self._evaluate("validation")

    def _stop(self) -> ExitCode:
        if self._checkpoints is None:
            raise UnsavedStopError(
                f"stopped after {self._state.iteration} steps, {UNSAVED_STOP}; "
                "a restart begins from the start, so give --save to resume where it stopped"
            )
        self._save()
        return ExitCode.PREEMPTED

    def _finish(self) -> ExitCode:
        self._save()
        return ExitCode.OK

    def _save(self) -> None:
        """Write a checkpoint, unless saving is off or this step has one."""
        if self._checkpoints is None or self._saved_iteration == self._state.iteration:
            return
        self._publish_state("saving")
        with self._span(RecordKind.CHECKPOINT), gathered_parameters(self._run):
            self._checkpoints.save(self._state)
        self._saved_iteration = self._state.iteration
        self._publish_state("training")

    def _evaluate(self, split: str) -> bool:
        """Evaluate a split; returns False if a stop of any rank ended it early."""
        iterator = self._iterators.valid if split == "validation" else self._iterators.test
        if iterator is None:
            return True
        self._publish_state("evaluating")
        if self._config.training.manual_gc and self._config.training.manual_gc_eval:
            self._collect_garbage()
        with self._span(RecordKind.EVALUATE):
            wish = self._stop_wish
            loss = evaluate(self._run, self._schedule, self._source, iterator, asked_to_stop=lambda: wish.requested)
        if loss is None:
            self._publish_state("training")
            return False
        if split == "validation":
            self._validated_iteration = self._state.iteration
            self._state.validation_due = False
        if self._observer is not None and split == "validation":
            self._observer.validation(loss)
        if self._reporter is not None:
            self._reporter.validation(self._state.iteration, loss, split)
        self._publish_state("training")
        return True

    def _report(self, outcome: StepOutcome) -> None:
        metrics = self._metrics(outcome)
        if self._observer is not None:
            self._observer.step_end(metrics)
        if self._reporter is not None:
            self._reporter.step(
                metrics,
                elapsed_s=outcome.elapsed_s,
                batch_size=outcome.batch_size,
                skipped_steps=self._state.skipped_iterations,
            )

    def _metrics(self, outcome: StepOutcome) -> StepMetrics:
        tokens_per_second = outcome.batch_size * self._config.model.seq_length / outcome.elapsed_s
        tflops = tokens_per_second * self._flops / self._run.layout.world_size / 1e12
        return StepMetrics(
            iteration=self._state.iteration,
            loss=outcome.loss.mean,
            learning_rate=learning_rate(self._state.optimizer),
            grad_norm=outcome.grad_norm,
            tokens_per_second=tokens_per_second,
            tflops_per_gpu=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            consumed_samples=self._state.consumed_samples,
            skipped=outcome.skipped,
        )

    def _explain_missing_mfu(self) -> None:
        reason = why_no_mfu(self._run.device.name, bf16=self._config.precision.bf16)
        if reason is not None and self._reporter is not None:
            self._reporter.line(f" {reason}")

    def _time_is_up(self) -> bool:
        limit = self._config.training.exit_duration_in_mins
        return limit is not None and time.monotonic() - self._began_s > limit * 60

    def _publish_state(self, state: str) -> None:
        if self._reporter is not None:
            self._reporter.state(state)

    @contextlib.contextmanager
    def _span(self, kind: RecordKind) -> Iterator[None]:
        """Open a span of the observer, if any; for work that is done at most a few times per step."""
        if self._observer is None:
            yield
            return
        self._observer.begin(kind, 0, NO_MICROBATCH)
        yield
        self._observer.end(kind)

    def _collect_garbage(self) -> None:
        with self._span(RecordKind.GC):
            gc.collect()

    @contextlib.contextmanager
    def _collected_garbage(self) -> Iterator[None]:
        """Collect garbage only where the loop does it, inside the context, with ``--manual-gc``."""
        if not self._config.training.manual_gc:
            yield
            return
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            gc.enable()


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
