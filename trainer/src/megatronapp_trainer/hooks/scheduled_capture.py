"""Captures of steps at an interval or by order. What captures is imported and connected when it is first needed."""

from collections.abc import Callable
from typing import Any, Protocol


class ConnectedCapture(Protocol):
    """Captures single steps on one rank."""

    def install(self, step: int, perturbation: str | None, *, is_repeated: bool = False) -> None:
        """Install the hooks of a step, counted from 1 over the whole job.

        `perturbation`: digest of the recipe that is in force in it. `is_repeated`: it has been computed before.
        """

    def remove(self) -> None:
        """Remove the hooks once all passes of the step have been launched."""

    def send(self, optimizer: Any | None) -> None:  # noqa: ANN401 - MegatronOptimizer
        """Send what the step gave; `optimizer` has updated the weights, or None."""

    def post(self, job: Any) -> None:  # noqa: ANN401 - FrameJob, not imported where nothing is captured
        """Send further frames of a step."""

    def close(self) -> None:
        """Send what is left, and end."""


class ScheduledCapture:
    """`TrainingCapture` of a rank: captures every n-th step, and the next one where an order says so.

    Its schedule is the same on all ranks, which obey orders at the same step boundary.
    """

    def __init__(self, connect: Callable[[int], ConnectedCapture], *, every: int) -> None:
        """Begin without a connection.

        Args:
            connect: connects to the agent; takes the interval, for the hub. Raises UsageError.
            every: steps from one capture to the next, counted over the whole job; 0: none.
        """
        self._connect = connect
        self.every = every
        self._is_ordered = False
        self._capture: ConnectedCapture | None = None

    def begin(self) -> None:
        """Connect before the first step if steps are captured. Raises UsageError where no agent passes frames on."""
        if self.every:
            self._capture = self._connect(self.every)

    def order(self, every: int | None) -> None:
        """Capture every n-th step from now on, none with 0; None: the next step, and the others as before."""
        if every is None:
            self._is_ordered = True
        else:
            self.every, self._is_ordered = every, False

    def step_begin(self, iteration: int, perturbation: str | None = None) -> bool:
        """Install the hooks if the step is captured; returns whether it is. `perturbation`: digest of the recipe that
        is in force in it.
        """
        step = iteration + 1
        if not self._is_ordered and (not self.every or step % self.every):
            return False
        self._is_ordered = False
        self._connected().install(step, perturbation)
        return True

    def step_again(self, iteration: int, perturbation: str | None = None) -> None:
        """Install the hooks for the second computation of the step that follows after `iteration` steps."""
        self._connected().install(iteration + 1, perturbation, is_repeated=True)

    def step_computed(self) -> None:
        """Remove the hooks of a captured step, and count weights and gradients."""
        assert self._capture is not None
        self._capture.remove()

    def step_ended(self, optimizer: Any | None) -> None:  # noqa: ANN401 - MegatronOptimizer
        """Count the updates of a captured step, if `optimizer` has done some, and send its statistics."""
        assert self._capture is not None
        self._capture.send(optimizer)

    def _connected(self) -> ConnectedCapture:
        if self._capture is None:
            self._capture = self._connect(self.every)
        return self._capture

    def post(self, job: Any) -> None:  # noqa: ANN401 - FrameJob, not imported where nothing is captured
        """Send further frames of a captured step."""
        assert self._capture is not None
        self._capture.post(job)

    def close(self) -> None:
        """Send what is left, and end."""
        if self._capture is not None:
            self._capture.close()
