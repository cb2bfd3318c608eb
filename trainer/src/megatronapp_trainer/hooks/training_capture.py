"""Captures of a training, as its loop sees them: a run without captures imports no more of them."""

from typing import Any, Protocol


class TrainingCapture(Protocol):
    """Captures of steps on one rank, called on the thread that computes. Must not wait or communicate."""

    @property
    def every(self) -> int:
        """Return the steps from one capture to the next; 0: none."""

    def order(self, every: int | None) -> None:
        """Capture every n-th step from now on, none with 0; None: the next step."""

    def begin(self) -> None:
        """Begin before the first step. Raises UsageError where no agent passes frames on."""

    def step_begin(self, iteration: int, perturbation: str | None = None) -> bool:
        """Begin the step that follows after `iteration` steps, before its first forward pass.

        `perturbation`: digest of the recipe that is in force in it. Returns whether it is captured, equal on all ranks.
        """

    def step_again(self, iteration: int, perturbation: str | None = None) -> None:
        """Capture the step that follows after `iteration` steps, which was not captured, in its second computation."""

    def step_computed(self) -> None:
        """All passes of a captured step have been launched and its gradients are reduced; no weight has changed yet."""

    def step_ended(self, optimizer: Any | None) -> None:  # noqa: ANN401 - MegatronOptimizer
        """A captured step has ended. `optimizer`: has updated the weights, with the rates of the step; None: none were
        updated.
        """

    def close(self) -> None:
        """Send what is left, and end."""
