"""Memory that a perturbation of a training takes on a rank, estimated before anything is drawn."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatronapp_common.control.orders import PerturbationTarget
from megatronapp_common.errors import OrderError
from megatronapp_common.scope.perturbation.recipe import Perturbation, Recipe
from megatronapp_trainer.hooks.perturbation.activations import LOGITS, PlacedPerturbation, by_site
from megatronapp_trainer.hooks.perturbation.limits import RANDOM_ACTIONS, width_of
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard
from megatronapp_trainer.hooks.perturbation.noise import DRAWING_BYTES
from megatronapp_trainer.hooks.perturbation.parameters import local_parameters
from megatronapp_trainer.hooks.sites import ShardAxis, Site, modules_of, site_of
from megatronapp_trainer.utils.byte_sizes import bytes_text

_FACTOR_BYTES = 4
"""Bytes of a factor of `uniform`, which the backward pass needs."""
_MASK_BYTES = 1
"""Bytes of a number of a mask, which the backward pass needs where not all numbers are perturbed."""
_MASTER_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Sizes from which the memory of a perturbation follows."""

    shard: ModelShard
    tokens: int
    """Tokens of a microbatch."""
    sequence_parallel: bool
    """Tensor ranks have parts of the sequence between their layers."""
    recomputed_layers: int | None
    """Layers that are recomputed at a time, if all layers are; None: activations stay until backward passes."""
    master_parts: int
    """Replicas among which the parameters of the optimizer are divided."""
    peak: Callable[[Sequence[int]], int]
    """Returns the most bytes that passes hold, from the bytes that a pass of each chunk holds."""
    free_bytes: Callable[[], int]

    def check(self, recipe: Recipe, models: Sequence[Any], target: PerturbationTarget, *, perturbs: bool) -> None:
        """Raise OrderError if this rank lacks the memory. `perturbs`: its replica is perturbed, not another one."""
        needed = 0
        if perturbs or target is PerturbationTarget.MASTER:
            needed += self.parameter_bytes(recipe, models, target)
        if perturbs:
            needed += self.activation_bytes(recipe, models)
        if any(entry.action.type in RANDOM_ACTIONS for entry in recipe.perturbations):
            needed += DRAWING_BYTES
        if needed > (free := self.free_bytes()):
            raise OrderError(
                f"a rank has {bytes_text(free)} of free memory, and the perturbation takes about {bytes_text(needed)} "
                "there",
                "choose fewer layers, sites or modules",
            )

    def parameter_bytes(self, recipe: Recipe, models: Sequence[Any], target: PerturbationTarget) -> int:
        """Return the bytes of the copies of parameters."""
        stored = [entry for entry in recipe.perturbations if entry.kind == "storage"]
        found = {local.parameter for entry in stored for model in models for local in _local(entry, model, self.shard)}
        if target is PerturbationTarget.MODEL:
            return sum(parameter.nbytes for parameter in found)
        return sum(-(-parameter.numel() * _MASTER_BYTES // self.master_parts) for parameter in found)

    def activation_bytes(self, recipe: Recipe, models: Sequence[Any]) -> int:
        """Return the bytes that perturbed activations add to what passes hold for their backward passes."""
        chunks = [self._pass_bytes(recipe, model) for model in models]
        if not any(chunks):
            return 0
        if self.recomputed_layers is None:
            return self.peak(chunks)
        layers = max(len(model.decoder.layers) for model in models)
        return -(-max(chunks) * min(self.recomputed_layers, layers) // max(1, layers))

    def _pass_bytes(self, recipe: Recipe, model: Any) -> int:  # noqa: ANN401 - GPTModel
        itemsize: int = model.config.params_dtype.itemsize
        total = 0
        for name, placed in by_site(recipe).items():
            site = site_of(name)
            for layer in [number for number, module in modules_of(site, model, required=False) if module is not None]:
                number_bytes = [_number_bytes(entry) for entry in placed if _selects(entry, layer, site)]
                if number_bytes:
                    total += (itemsize + sum(number_bytes)) * self._numbers(site)
        return total

    def _numbers(self, site: Site) -> int:
        """Return the numbers of a site in a pass on this rank."""
        width, parts = width_of(site, self.shard), self.shard.tensor_size
        if site.name == LOGITS:
            return self.tokens * -(-width // parts)
        is_divided = self.sequence_parallel and site.axis is ShardAxis.WHOLE
        return self.tokens * width // (parts if is_divided else 1)


def _local(entry: Perturbation, model: Any, shard: ModelShard) -> list[Any]:  # noqa: ANN401 - GPTModel
    return list(local_parameters(entry, model, shard))


def _selects(placed: PlacedPerturbation, layer: int, site: Site) -> bool:
    layers = placed.perturbation.layers
    return layers is None or not site.per_layer or layer in layers


def _number_bytes(placed: PlacedPerturbation) -> int:
    """Return the bytes of each number that a change adds to its result: its factor, and its mask."""
    entry = placed.perturbation
    is_factor = entry.action.type == "uniform" and entry.kind == "calculation"
    return _MASK_BYTES + (_FACTOR_BYTES if is_factor else 0)
