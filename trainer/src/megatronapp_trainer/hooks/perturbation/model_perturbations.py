"""The recipes that a rank knows, by digest, and the one that its model computes with now."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_trainer.hooks.perturbation.activations import ActivationPerturbations
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard
from megatronapp_trainer.hooks.perturbation.row_context import RowContext
from megatronapp_trainer.hooks.perturbation.storage import PerturbedParameters


class ModelPerturbations:
    """Perturbations of one rank's model; at most one recipe is active. Without one the model has no hook of ours."""

    def __init__(self, model: Any, shard: ModelShard, *, slots: int) -> None:  # noqa: ANN401 - GPTModel
        """`slots`: number of sequences that are generated at a time."""
        self._model = model
        self._shard = shard
        self._slots = slots
        self._parameters: dict[str, PerturbedParameters] = {}
        self._activations: dict[str, ActivationPerturbations] = {}
        self._recording: set[str] = set()
        """Recipes that record values in this forward pass."""
        self.active: str | None = None
        """Digest of the active recipe."""

    def add(self, recipe: Recipe, source_lengths: Mapping[int, int] = MappingProxyType({})) -> None:
        """Draw the noise of parameters; a recipe that is known already is unchanged. Ends the active recipe.

        `source_lengths`: tokens of the sources of patches, by index of the perturbation.
        """
        if recipe.digest not in self._activations:
            self.activate(None)  # its parameters would be taken for the model's own
            self._parameters[recipe.digest] = PerturbedParameters(recipe, [self._model], self._shard)
            self._activations[recipe.digest] = ActivationPerturbations(
                recipe, self._model, self._shard, slots=self._slots, source_lengths=source_lengths
            )

    @property
    def num_bytes(self) -> int:
        """Return the memory of all copies of parameters, and of the values of patches."""
        copies = sum(parameters.num_bytes for parameters in list(self._parameters.values()))
        return copies + sum(activations.num_bytes for activations in list(self._activations.values()))

    def drop(self, digest: str) -> None:
        """Forget a recipe, and free its copies of parameters."""
        if self.active == digest:
            self.activate(None)
        del self._parameters[digest], self._activations[digest]

    def activate(self, digest: str | None) -> None:
        """Compute with this recipe from now on; None: with the model as it is."""
        if digest == self.active:
            return
        if self.active is not None:
            self._activations[self.active].remove()
            self._parameters[self.active].swap_out()
        self.active = digest
        if digest is not None:
            self._parameters[digest].swap_in()
            self._activations[digest].install()

    def record(self, digest: str, place: int, rows: slice, start: int) -> None:
        """Record the values of a patch in the next forward pass; `start`: position of the first of these rows."""
        self._activations[digest].record(place, rows, start)
        self._recording.add(digest)

    def end_recording(self) -> None:
        """Remove the hooks that record."""
        for digest in self._recording:
            self._activations[digest].end_recording()
        self._recording.clear()

    def set_rows(self, rows: RowContext | None, output_rows: torch.Tensor | None = None) -> None:
        """Set the tokens of the next forward pass (None: leave activations as they are), and the rows with logits.

        `output_rows` None: logits of all rows are computed.
        """
        if self.active is not None:
            activations = self._activations[self.active]
            activations.rows, activations.output_rows = rows, output_rows
