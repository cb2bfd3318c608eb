"""The second computation of a step that was not captured, to find the first site that is not finite."""

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.checkpoint import random_states
from megatronapp_trainer.data.microbatches import HostMicrobatch, RepeatableBatches, StepFeed
from megatronapp_trainer.hooks.training_capture import TrainingCapture
from megatronapp_trainer.hooks.training_perturbation import TrainingPerturbation
from megatronapp_trainer.models.language_model_loss import reduce_loss
from megatronapp_trainer.training.evaluate import gathered_parameters
from megatronapp_trainer.training.loop_context import LoopContext

log = logging.getLogger(__name__)


class SecondComputation:
    """Computes the newest step once more: the same microbatches, weights and random states, captured, and no update.

    Until then a step that would be computed again costs the random states that it begins with, and its microbatches
    stay on the host.
    """

    def __init__(
        self,
        context: LoopContext,
        batches: Iterator[HostMicrobatch],
        capture: TrainingCapture,
        perturbation: TrainingPerturbation | None,
    ) -> None:
        self._context = context
        self._run = context.run
        self.batches = RepeatableBatches(batches)
        """Microbatches of training, from which steps must read."""
        self._capture = capture
        self._perturbation = perturbation
        self._states: dict[str, Any] | None = None

    def step_begin(self, *, is_captured: bool) -> None:
        """Store the random states of a step before its first pass, if it would be computed again."""
        self._states = None if is_captured or not self._capture.every else random_states.capture()
        self.batches.begin_step(stores=self._states is not None)

    def run(self, microbatches: int) -> str:
        """Compute the step again, unless it was captured; returns what is known then, for users.

        Collective over all ranks, which have refused the step together. The text says if it fails.
        """
        if self._states is None:
            return ""
        try:
            with self._context.monitor.span(RecordKind.CAPTURE), gathered_parameters(self._run):
                loss = self._compute(microbatches, self._states)
        except Exception as error:
            log.exception("the second computation of the step failed")
            return f"Computing the step again, with statistics of its layers, failed: {type(error).__name__}: {error}"
        step = self._run.state.iteration + 1
        found = f"was {loss:.6g} then" if math.isfinite(loss) else f"was {loss} again"
        return (
            f"The step was computed once more with statistics of its layers, and its loss {found}. The capture of step "
            f"{step} names the first site that is not finite, if there is any"
        )

    def _compute(self, microbatches: int, states: dict[str, Any]) -> float:
        state = self._run.state
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        random_states.restore(states)
        feed = StepFeed(
            self._context.source,
            self.batches.again(),
            microbatches,
            observer=None,
            is_captured=True,
            is_repeated=True,
        )
        perturbed = contextlib.nullcontext() if self._perturbation is None else self._perturbation.again()
        with perturbed as digest:
            self._capture.step_again(state.iteration, digest)
            reports = self._context.schedule.train(feed, microbatches)
        self._capture.step_computed()
        self._capture.step_ended(None)
        run = self._run
        reduction = reduce_loss(reports, run.layout, run.device, names=run.loss_names, minimised=run.minimised_losses)
        return reduction.read().mean
