"""Captures of a training, as its loop sees them: a run without captures imports no more of them."""

from typing import Protocol


class TrainingCapture(Protocol):
    """Captures of steps on one rank, called on the thread that computes. Must not wait or communicate."""

    def step_begin(self, iteration: int) -> bool:
        """Begin the step that follows after `iteration` steps, before its first forward pass.

        Returns whether it is captured, equal on all ranks.
        """

    def step_computed(self) -> None:
        """All passes of a captured step have been launched and its gradients are reduced; no weight has changed yet."""

    def close(self) -> None:
        """Send what is left, and end."""
