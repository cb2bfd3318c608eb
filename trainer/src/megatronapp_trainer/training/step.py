"""One optimizer step: forward and backward passes, the loss over all ranks, the update."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.data.microbatches import HostMicrobatch, StepFeed
from megatronapp_trainer.errors import NotFiniteError
from megatronapp_trainer.hooks.training_capture import TrainingCapture
from megatronapp_trainer.hooks.training_perturbation import TrainingPerturbation
from megatronapp_trainer.models.experts.statistics import ExpertStatistics, expert_counter
from megatronapp_trainer.models.language_model_loss import (
    PendingLossReduction,
    StepLoss,
    reduce_loss,
    refuse_infinite_gradients,
    refuse_not_finite,
)
from megatronapp_trainer.training.evaluate import is_due
from megatronapp_trainer.training.loop_context import LoopContext
from megatronapp_trainer.training.monitor import StepOutcome
from megatronapp_trainer.training.second_computation import SecondComputation


class TrainingStep:
    """Runs optimizer steps. The ranks agree within each whether to stop after it."""

    def __init__(
        self,
        context: LoopContext,
        batches: Iterator[HostMicrobatch],
        capture: TrainingCapture | None = None,
        perturbation: TrainingPerturbation | None = None,
    ) -> None:
        """Wrap the optimizer's gradient norm, which refuses values that are not finite from now on."""
        self._context = context
        self._run = context.run
        self._config = context.run.config
        self._state = context.run.state
        self._monitor = context.monitor
        self._batches = batches
        self._capture = capture
        self._is_captured = False
        self._perturbation = perturbation
        self._perturbed_by: str | None = None
        self._again: SecondComputation | None = None
        if (
            capture is not None
            and self._config.training.check_for_nan
            and self._config.control.scope_capture_not_finite
        ):
            self._again = SecondComputation(context, batches, capture, perturbation)
            self._batches = self._again.batches
        self._pending: PendingLossReduction | None = None
        self._experts = expert_counter(self._config, self._run.layout, self._state.chunks)
        optimizer = self._state.optimizer
        optimizer.get_grad_norm = self._refusing_not_finite(optimizer.get_grad_norm)
        self._began_s = time.monotonic()

    def run(self) -> StepOutcome:
        """Run one step and report it."""
        began_s = time.perf_counter()
        self._monitor.step_begin()
        microbatches = self._run.batches.num_microbatches(self._state.consumed_samples)
        self._pending = pending = self._forward_backward(microbatches)
        succeeded, norm = self._update(microbatches)
        grad_norm = None if norm is None else float(norm)
        batch_size = microbatches * self._run.batches.micro_batch_size * self._run.batches.data_size
        loss = pending.read()
        self._monitor.agreed(loss.announced)
        self._advance(batch_size, succeeded=succeeded)
        outcome = StepOutcome(
            loss=loss,
            grad_norm=grad_norm,
            skipped=not succeeded,
            batch_size=batch_size,
            elapsed_s=time.perf_counter() - began_s,
            is_captured=self._is_captured,
            perturbation=self._perturbed_by,
            experts=self._expert_statistics(loss, microbatches, batch_size),
        )
        self._monitor.step_end(outcome)
        return outcome

    def _expert_statistics(self, loss: StepLoss, microbatches: int, batch_size: int) -> ExpertStatistics | None:
        if self._experts is None:
            return None
        tokens = batch_size * self._config.model.seq_length
        return self._experts.read(loss.further, microbatches=microbatches, tokens=tokens)

    def _update(self, microbatches: int) -> tuple[bool, Any]:
        """Update the weights; returns whether they changed, and the norm of the gradients."""
        optimizer = self._state.optimizer
        self._context.wait_for_copies()
        succeeded = False
        try:
            succeeded, norm, _ = optimizer.step()  # computes the norm even where nothing is clipped
            if not succeeded and self._config.training.check_for_nan and self._pending is not None:
                # an overflow of gradients is mended by another scale, a loss that is not finite is not
                refuse_not_finite(self._pending.read(), self._pending, self._run.layout, step=self._state.iteration)
        except NotFiniteError as error:
            note = "" if self._again is None else self._again.run(microbatches)
            if not note:
                raise
            raise NotFiniteError(f"{error}. {note}") from error
        finally:  # a step whose loss is not finite is sent, too
            if self._capture is not None and self._is_captured:
                with self._monitor.span(RecordKind.CAPTURE):
                    self._capture.step_ended(optimizer if succeeded else None)
        return succeeded, norm

    def _forward_backward(self, microbatches: int) -> PendingLossReduction:
        for chunk in self._state.chunks:
            chunk.zero_grad_buffer()
        self._state.optimizer.zero_grad()
        self._perturbed_by = None if self._perturbation is None else self._perturbation.active
        self._is_captured = self._capture is not None and self._capture.step_begin(
            self._state.iteration, self._perturbed_by
        )
        if self._again is not None:
            self._again.step_begin(is_captured=self._is_captured)
        feed = StepFeed(
            self._context.source,
            self._batches,
            microbatches,
            observer=self._monitor.observer,
            is_captured=self._is_captured or self._perturbed_by is not None,
        )
        if self._perturbation is not None:
            self._begin_perturbed(self._perturbation)
        with self._run.attention():
            reports = self._context.schedule.train(feed, microbatches)
        if self._perturbation is not None:
            self._perturbation.passes_done()
        if self._capture is not None and self._is_captured:
            with self._monitor.span(RecordKind.CAPTURE):
                self._capture.step_computed()
        with self._monitor.span(RecordKind.LOSS_REDUCE):
            return reduce_loss(
                reports,
                self._run.layout,
                self._run.device,
                names=self._run.loss_names,
                minimised=self._run.minimised_losses,
                stop=self._is_stop_requested(),
                save=self._context.stop_request.save,
                time_is_up=self._time_is_up(),
                is_saving=self._context.saves is not None and self._context.saves.busy(),
                announced=self._monitor.announcement(),
                further=None if self._experts is None else self._experts.take(self._run.device.torch_device),
            )

    def _is_stop_requested(self) -> bool:
        """Return True if this rank asks all to stop after this step: at once, or because a checkpoint follows it."""
        request = self._context.stop_request
        saves = is_due(self._state.iteration + 1, self._config.checkpoint.save_interval)
        return request.requested or (request.at_checkpoint and saves)

    def _begin_perturbed(self, perturbation: TrainingPerturbation) -> None:
        """Perturb the passes of the step; the span lets detectors and tuners leave a perturbed step out."""
        self._context.wait_for_copies()  # it may change weights
        span = self._monitor.span(RecordKind.PERTURB) if self._perturbed_by else contextlib.nullcontext()
        with span:
            perturbation.step_begin(self._state.iteration, self._state.consumed_samples)

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

    def _time_is_up(self) -> bool:
        limit = self._config.training.exit_duration_in_mins
        return limit is not None and time.monotonic() - self._began_s > limit * 60
