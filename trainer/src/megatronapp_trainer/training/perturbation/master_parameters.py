"""Perturbation of the parameters that an optimizer updates: with 32 bits, whole or this replica's part of them."""

import dataclasses
from typing import Any

import torch

from megatronapp_common.scope.perturbation.recipe import Perturbation, Recipe
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard
from megatronapp_trainer.hooks.perturbation.noise import BLOCK_ELEMENTS, noise_key
from megatronapp_trainer.hooks.perturbation.parameters import LocalParameter, element_index, local_parameters
from megatronapp_trainer.hooks.perturbation.storage import changed_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class MasterPart:
    """Numbers that the optimizer of this rank updates of a parameter."""

    values: torch.Tensor
    """Flat view of them."""
    first: int
    """Place of the first one in the parameter."""


class MasterParameters:
    """The perturbed numbers of a recipe, to be exchanged with those of the optimizer and back, bit for bit."""

    def __init__(self, recipe: Recipe, models: list[Any], chunks: list[Any], optimizer: Any, shard: ModelShard) -> None:  # noqa: ANN401 - of megatron-core
        """Draw the noise. `models`: of the chunks, without the wrappers of data parallelism."""
        self._chunks = chunks
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self._perturbed: dict[torch.nn.Parameter, tuple[MasterPart, torch.Tensor]] = {}
        for place, perturbation in enumerate(recipe.perturbations):
            for model in models if perturbation.kind == "storage" else ():
                for local in local_parameters(perturbation, model, shard):
                    self._draw(local, perturbation, noise_key(recipe.seed, place, local.name), shard)

    def swap(self) -> None:
        """Exchange the numbers, and let the model compute with them. Collective over the replicas of each chunk."""
        with torch.no_grad():
            for part, perturbed in self._perturbed.values():
                own = part.values.clone()
                part.values.copy_(perturbed)
                perturbed.copy_(own)
            for optimizer in self._optimizers:
                if hasattr(optimizer, "_copy_main_params_to_model_params"):
                    optimizer._copy_main_params_to_model_params()
            for chunk in self._chunks:
                if chunk.ddp_config.use_distributed_optimizer:
                    chunk.start_param_sync(force_sync=True)

    def _draw(self, local: LocalParameter, perturbation: Perturbation, key: tuple[int, int], shard: ModelShard) -> None:
        parameter = local.parameter
        if parameter not in self._perturbed:
            part = self._part_of(parameter)
            if part is None:
                return
            self._perturbed[parameter] = part, part.values.clone()
        part, values = self._perturbed[parameter]
        index = element_index(local, perturbation, shard)
        for start in range(0, values.numel(), BLOCK_ELEMENTS):
            block = values[start : start + BLOCK_ELEMENTS]
            indices, chosen = index.flat(part.first + start, part.first + start + block.numel())
            block.copy_(changed_values(block, perturbation.action, key, indices, chosen))

    def _part_of(self, parameter: torch.nn.Parameter) -> MasterPart | None:
        """Return this rank's part; None where the optimizers of other replicas update all of it."""
        if parameter.dtype is torch.float32:
            return MasterPart(values=parameter.data.view(-1), first=0)  # equal on all replicas
        master = getattr(parameter, "main_param", None)
        if master is None:
            return None
        first = 0
        if getattr(parameter, "main_param_sharded", False):
            (owner,) = [mine for mine in self._optimizers if parameter in getattr(mine, "model_param_gbuf_map", {})]
            first = owner._get_model_param_range_map(parameter)["param"].start
        return MasterPart(values=master.data.view(-1), first=first)
