"""Protocol of the boundaries of a step, in training and in generation alike."""

from collections.abc import Hashable
from typing import Protocol, TypeVar

Step_contra = TypeVar("Step_contra", contravariant=True)
Result_contra = TypeVar("Result_contra", contravariant=True)


class StepBoundary(Protocol[Step_contra, Result_contra]):
    """Called before and after each step, on the thread that computes.

    Must not block, wait for the device or communicate. `StepObserver` extends it for training, with spans;
    `ForwardObserver` for generation, with what CUDA graphs need.
    """

    def step_begin(self, step: Step_contra, /) -> Hashable:
        """Begin a step. Return what of it is captured; None: nothing."""

    def step_end(self, result: Result_contra, /) -> None:
        """End a step. All of its work has been launched, though the device may not have finished it."""
