"""Memory and work of a recipe on the pipeline stage with the most of it, estimated on rank 0 before any rank draws."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatronapp_common.scope.perturbation.recipe import Perturbation, Recipe, RecipeError
from megatronapp_trainer.hooks.perturbation.activations import LOGITS
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard
from megatronapp_trainer.hooks.perturbation.noise import DRAWING_BYTES
from megatronapp_trainer.hooks.perturbation.parameters import EMBEDDING, OUTPUT, OUTSIDE_LAYERS
from megatronapp_trainer.hooks.perturbation.patches import recorded_positions
from megatronapp_trainer.hooks.sites import BUILT_IN, ShardAxis, Site, site_of

MAX_STEP_NUMBERS = 1 << 30
"""Most random numbers that the recipe of a step draws on a rank; about a second of an H100."""
MAX_PARAMETER_NUMBERS = 1 << 33
"""Most random numbers that the parameters of a recipe draw on a rank."""
RANDOM_ACTIONS = frozenset({"gaussian", "uniform", "bitFlip"})
_MEAN_BYTES = 8
"""Bytes of a sum over a prompt, in float64."""


def check_work(recipe: Recipe, model: Any, shard: ModelShard, *, tokens: int) -> None:  # noqa: ANN401 - GPTModel
    """Raise RecipeError if a recipe draws too many numbers. `tokens`: most tokens of a step."""
    step = max(_layers_times(recipe, shard, lambda entry: _numbers_of_token(entry, shard))) * tokens
    if step > MAX_STEP_NUMBERS:
        raise RecipeError(
            f"perturbations: a step of {tokens} tokens would draw {step} random numbers on a rank, and at most "
            f"{MAX_STEP_NUMBERS} may be drawn; choose fewer layers or perturbations"
        )
    stored = max(sum(count for _, count, _ in found) for found in _stored_of_stages(recipe, model, shard))
    if stored > MAX_PARAMETER_NUMBERS:
        raise RecipeError(
            f"perturbations: the parameters would draw {stored} random numbers on a rank, and at most "
            f"{MAX_PARAMETER_NUMBERS} may be drawn; choose fewer layers, modules or perturbations"
        )


def needed_bytes(recipe: Recipe, model: Any, shard: ModelShard, *, slots: int, tokens: int) -> int:  # noqa: ANN401
    """Return the memory that a recipe takes: copies of parameters, means of prompts, and numbers while they are drawn.

    `slots`: sequences at a time. `tokens`: most tokens of a step.
    """
    itemsize: int = model.config.params_dtype.itemsize
    sums = max(_layers_times(recipe, shard, lambda entry: _width_of_mean(entry, shard)))
    means = sums * slots * (_MEAN_BYTES + itemsize)
    chunk = max((_width_of_mean(entry, shard) for entry in recipe.perturbations), default=0) * tokens * _MEAN_BYTES
    copies = max(
        sum({name: size for name, _, size in found}.values()) for found in _stored_of_stages(recipe, model, shard)
    )
    draws = any(entry.action.type in RANDOM_ACTIONS for entry in recipe.perturbations)
    return copies + means + chunk + (DRAWING_BYTES if draws else 0)


def recorded_bytes(
    recipe: Recipe,
    model: Any,  # noqa: ANN401 - GPTModel
    shard: ModelShard,
    source_lengths: Mapping[int, int],
) -> int:
    """Return the memory of the values that patches take. `source_lengths`: tokens of each source, by index."""
    itemsize: int = model.config.params_dtype.itemsize
    sums = [0] * len(shard.stages)
    for place, length in source_lengths.items():
        entry = recipe.perturbations[place]
        site = site_of(entry.site or "")
        numbers = len(recorded_positions(entry, length)) * width_of(site, shard)
        for stage, span in enumerate(shard.stages):
            sums[stage] += numbers * len(_layers_within(entry, span, site)) * itemsize
    return max(sums)


def _layers_times(recipe: Recipe, shard: ModelShard, count: Any) -> list[int]:  # noqa: ANN401 - of a perturbation
    """Return for each stage the sum over perturbations of their layers there times a count of each."""
    sums = [0] * len(shard.stages)
    for entry in recipe.perturbations:
        if entry.kind == "calculation" and (number := count(entry)) > 0:
            for stage, span in enumerate(shard.stages):
                sums[stage] += number * len(_layers_within(entry, span, site_of(entry.site or "")))
    return sums


def _layers_within(entry: Perturbation, span: tuple[int, int], site: Site) -> list[int]:
    """Return the selected layers of a stage; a site without layers is one of each stage."""
    if not site.per_layer:
        return [-1]
    return [layer for layer in range(*span) if entry.layers is None or layer in entry.layers]


def _numbers_of_token(entry: Perturbation, shard: ModelShard) -> int:
    return width_of(site_of(entry.site or ""), shard) if entry.action.type in RANDOM_ACTIONS else 0


def _width_of_mean(entry: Perturbation, shard: ModelShard) -> int:
    return width_of(site_of(entry.site or ""), shard) if entry.action.over is not None else 0


def width_of(site: Site, shard: ModelShard) -> int:
    """Return the numbers of a token that a rank has of a site; of a site of a plugin, which are unknown, the widest."""
    inner = shard.ffn * (2 if shard.gated else 1) // shard.tensor_size
    heads = {
        ShardAxis.HEADS: shard.heads // shard.tensor_size,
        ShardAxis.KEY_HEADS: max(1, shard.key_heads // shard.tensor_size),
    }
    if site.axis in heads:
        return heads[site.axis] * shard.head_width
    if site.axis is ShardAxis.MLP:
        return inner
    if site.name not in BUILT_IN:
        return max(inner, shard.hidden)
    return shard.vocabulary if site.name == LOGITS else shard.hidden


def _stored_of_stages(recipe: Recipe, model: Any, shard: ModelShard) -> list[list[tuple[str, int, int]]]:  # noqa: ANN401
    """Return for each stage the parameters that a recipe changes: name, random numbers that it draws, and bytes."""
    found: list[list[tuple[str, int, int]]] = [[] for _ in shard.stages]
    for entry in recipe.perturbations:
        if entry.kind == "storage":
            for stage, name, tensor in _parameters(entry, model, shard):
                drawn = tensor.numel() if entry.action.type in RANDOM_ACTIONS else 0
                found[stage].append((name, drawn, tensor.nbytes))
    return found


def _parameters(entry: Perturbation, model: Any, shard: ModelShard) -> Iterator[tuple[int, str, torch.Tensor]]:  # noqa: ANN401
    """Yield stage, name and a tensor of the same size for each parameter that a storage perturbation selects.

    All layers, and all tensor ranks, hold tensors of equal sizes.
    """
    module, last = entry.parameter or "", len(shard.stages) - 1
    if module in OUTSIDE_LAYERS:
        stages = {0, last} if module == EMBEDDING and shard.tied else {0}
        if module not in {EMBEDDING, "embedding.position_embeddings"}:
            stages = {last}
        for stage in stages:
            yield stage, module, _like(module, model)
        return
    like = (
        dict(model.decoder.layers[0].named_parameters())[f"{module}.{entry.tensor}"] if model.decoder.layers else None
    )
    for stage, span in enumerate(shard.stages):
        for layer in _layers_within(entry, span, BUILT_IN["residual"]):
            if like is not None:
                yield stage, f"{layer}.{module}.{entry.tensor}", like


def _like(module: str, model: Any) -> torch.Tensor:  # noqa: ANN401 - GPTModel of the first stage
    """Return a tensor of the size of a parameter outside of the layers, which another stage may hold."""
    if module == "decoder.final_layernorm":
        return torch.empty(model.config.hidden_size, dtype=model.config.params_dtype, device="meta")
    path = EMBEDDING if module == OUTPUT else module
    weight: torch.Tensor = model.get_submodule(path).weight
    return weight
