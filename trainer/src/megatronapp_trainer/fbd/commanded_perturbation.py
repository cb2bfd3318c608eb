"""Perturbation of a training on forward ranks of MegaFBD: backward ranks draw the noise and send perturbed weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from megatronapp_common.control.orders import Order
from megatronapp_common.errors import OrderError
from megatronapp_common.scope.perturbation.recipe import Recipe


class CommandedPerturbation:
    """`TrainingPerturbation` of a forward rank: knows which recipe is in force, for what the rank captures.

    A recipe has parameters alone, so that it is in force in one step.
    """

    def __init__(self) -> None:
        self._prepared: str | None = None
        self._active: str | None = None
        self._newest: str | None = None
        """Digest of the newest step; None: it was not perturbed."""

    @property
    def active(self) -> str | None:
        """Return the digest of the recipe in force."""
        return self._active

    @property
    def newest(self) -> str | None:
        """Return the digest of the recipe that was in force in the newest step."""
        return self._newest

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return nothing: a backward rank reports them."""
        return []

    def prepare(self, order: Order, _iteration: int) -> None:
        """Note the digest; backward ranks check the order."""
        with contextlib.suppress(ValidationError):  # which backward ranks refuse
            self._prepared = None if order.recipe is None else Recipe.model_validate_json(order.recipe).digest

    def commit(self) -> None:
        """Let the recipe be in force in the next step."""
        self._active, self._prepared = self._prepared, None

    def discard(self) -> None:
        """Forget what was prepared."""
        self._prepared = None

    def undo(self) -> None:
        """End the recipe in force. Raises OrderError where backward ranks do."""
        if self._active is None:
            raise OrderError("no perturbation is in force, or a step has used it", "perturb the training first")
        self._active = None

    def undo_unused(self) -> None:
        """End the recipe in force, which no step has used."""
        self._active = None

    def step_begin(self, _iteration: int, _consumed_samples: int) -> None:
        """Begin a step, whose weights backward ranks send."""
        self._newest = self._active

    def passes_done(self) -> None:
        """End a step; weights of the next one are sent again."""
        self._active = None

    @contextlib.contextmanager
    def again(self) -> Iterator[str | None]:
        """Give the digest of the newest step, whose weights backward ranks send once more."""
        yield self._newest
