"""Storage perturbations: copies of parameters, swapped in and out by pointer, so that undoing changes no bit."""

from collections.abc import Sequence
from typing import Any

import torch

from megatronapp_common.scope.perturbation.recipe import Action, Bits, Perturbation, Recipe
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard
from megatronapp_trainer.hooks.perturbation.noise import blocks_of_rows, element_block, gaussian, noise_key, scaled
from megatronapp_trainer.hooks.perturbation.parameters import LocalParameter, element_index, local_parameters
from megatronapp_trainer.hooks.perturbation.philox import RandomBlock, uniform

_WHOLE_NUMBERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_EXPONENT = {torch.float32: (23, 8), torch.bfloat16: (7, 8), torch.float16: (10, 5)}
"""Lowest bit of the exponent, and its number of bits."""


class PerturbedParameters:
    """The perturbed copies of a recipe on one rank. The original tensors are never written."""

    def __init__(self, recipe: Recipe, models: Sequence[Any], shard: ModelShard) -> None:
        """Draw the noise. `models`: megatron-core's GPTModel of each chunk of this rank."""
        self._originals: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._copies: dict[torch.nn.Parameter, torch.Tensor] = {}
        with torch.no_grad():
            for place, perturbation in enumerate(recipe.perturbations):
                for model in models if perturbation.kind == "storage" else ():
                    for local in local_parameters(perturbation, model, shard):
                        self._perturb(local, perturbation, noise_key(recipe.seed, place, local.name), shard)

    def swap_in(self) -> None:
        """Let the model compute with the copies."""
        for parameter, copy in self._copies.items():
            parameter.data = copy

    def swap_out(self) -> None:
        """Let the model compute with its own parameters again."""
        for parameter, original in self._originals.items():
            parameter.data = original

    def swap_contents(self) -> None:
        """Exchange the numbers of parameters and copies; a second call restores every bit."""
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                own = parameter.data.clone()
                parameter.data.copy_(copy)
                copy.copy_(own)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def _perturb(
        self, local: LocalParameter, perturbation: Perturbation, key: tuple[int, int], shard: ModelShard
    ) -> None:
        parameter = local.parameter
        if parameter not in self._copies:
            self._originals[parameter] = parameter.data
            self._copies[parameter] = parameter.data.clone()
        copy = self._copies[parameter]
        matrix = copy if copy.ndim > 1 else copy[:, None]
        index = element_index(local, perturbation, shard)
        for rows in blocks_of_rows(*matrix.shape):
            matrix[rows] = changed_values(
                matrix[rows], perturbation.action, key, index.indices(rows), index.chosen(rows)
            )


def changed_values(
    values: torch.Tensor, action: Action, key: tuple[int, int], indices: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Return values of a parameter with an action applied to the chosen ones; `indices`: their global places."""
    if action.type == "zero":
        changed = torch.zeros_like(values)
    else:
        block = element_block(key, indices)
        if action.type == "bitFlip":
            assert action.bits is not None and action.rate is not None
            changed = flipped(values, action.bits, action.rate, block)
        else:
            assert action.coefficient is not None
            draw = gaussian if action.type == "gaussian" else scaled
            changed = draw(values, action.coefficient, block)
    return torch.where(chosen, changed, values)


def flipped(values: torch.Tensor, bits: Bits, rate: float, block: RandomBlock) -> torch.Tensor:
    """Flip one bit of the part where a block's first integer is below the rate; its second chooses the bit."""
    lowest, width = _EXPONENT[values.dtype]
    first, count = {"sign": (lowest + width, 1), "exponent": (lowest, width), "mantissa": (0, lowest)}[bits]
    bit = first + ((block.second * count) >> 32)
    mask = torch.where(uniform(block.first) < rate, torch.ones_like(bit) << bit, torch.zeros_like(bit))
    whole = _WHOLE_NUMBERS[values.dtype]
    # 2^31 and 2^15 are beyond the signed type, and the conversion keeps their bits.
    return (values.view(whole) ^ mask.to(whole)).view(values.dtype)
