"""Perturbation of a training, as its control and its steps see it: a run without orders imports no more of it."""

import contextlib
from typing import Any, Protocol

from megatronapp_common.control.orders import Order


class TrainingPerturbation(Protocol):
    """Perturbation of one rank. All ranks call it at the same step boundaries."""

    @property
    def active(self) -> str | None:
        """Digest of the recipe that is in force; None: none is."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Perturbed steps as the progress document has them, the newest last."""

    def prepare(self, order: Order, iteration: int) -> None:
        """Check an order to perturb, and draw noise of parameters, without any effect yet. Raises OrderError."""

    def commit(self) -> None:
        """Apply what was prepared, as all ranks have. Collective over the replicas."""

    def discard(self) -> None:
        """Forget what was prepared, because a rank refuses it."""

    def undo(self) -> None:
        """End the perturbation in force. Collective over the replicas; raises OrderError where it cannot be undone."""

    def undo_unused(self) -> None:
        """End the perturbation in force if no step has used it. Collective over the replicas."""

    def step_begin(self, iteration: int, consumed_samples: int) -> None:
        """Perturb the passes of the step that follows after `iteration` steps."""

    def again(self) -> contextlib.AbstractContextManager[str | None]:
        """Perturb passes inside the context as those of the newest step were, which is computed again.

        Gives the digest of its recipe; None: it was not perturbed.
        """

    def passes_done(self) -> None:
        """Compute as before again: the passes of the step have been launched, and the optimizer follows."""
