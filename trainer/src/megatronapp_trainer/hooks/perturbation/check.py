"""Check of a recipe against the model: sites, parameters, layers, heads that there are. On rank 0, before any rank."""

from collections.abc import Iterator
from typing import Any

from megatronapp_common.scope.perturbation.recipe import Perturbation, Recipe, RecipeError
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.hooks.perturbation.activations import LOGITS
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard
from megatronapp_trainer.hooks.perturbation.parameters import EMBEDDING, FC1, OUTPUT, OUTSIDE_LAYERS, PROJECTION, QKV
from megatronapp_trainer.hooks.sites import BUILT_IN, ShardAxis, Site, known_sites, modules_of, registered, site_of


def check_recipe(recipe: Recipe, model: Any, shard: ModelShard) -> None:  # noqa: ANN401 - GPTModel of rank 0
    """Raise RecipeError with the place of the first thing in the recipe that this model does not have."""
    for place, perturbation in enumerate(recipe.perturbations):
        for problem in _problems(perturbation, model, shard):
            raise RecipeError(f"perturbations.{place}.{problem}")


def _problems(perturbation: Perturbation, model: Any, shard: ModelShard) -> Iterator[str]:  # noqa: ANN401
    for place, layer in enumerate(perturbation.layers or ()):
        if layer >= shard.layers:
            yield f"layers.{place}: there is no layer {layer}; write 0 to {shard.layers - 1}"
    if perturbation.kind == "storage":
        yield from _storage_problems(perturbation, model, shard)
    elif perturbation.kind == "calculation":
        yield from _site_problems(perturbation, model, shard)


def _site_problems(perturbation: Perturbation, model: Any, shard: ModelShard) -> Iterator[str]:  # noqa: ANN401
    name = perturbation.site or ""
    writable = [site.name for site in (*BUILT_IN.values(), *registered()) if site.put is not None]
    if name not in writable:
        reason = "can only be read" if name in known_sites() else "is not a site of this model"
        yield f"site: {name} {reason}; write one of {', '.join(writable)}"
        return
    site = site_of(name)
    try:
        modules_of(site, model)
    except CaptureError as error:
        yield f"site: {error}"
        return
    if perturbation.layers is not None and not site.per_layer:
        yield f"layers: {name} belongs to no layer; leave layers out"
    yield from _head_problems(perturbation, _heads_of(site, shard), name)
    yield from _action_problems(perturbation, site, shard)


def _action_problems(perturbation: Perturbation, site: Site, shard: ModelShard) -> Iterator[str]:
    action = perturbation.action
    if action.type == "patch" and site.name == LOGITS:
        yield "action.type: logits are not computed for every position of a prompt; patch another site"
    if action.over == "prompt" and site.name == LOGITS:
        yield "action.over: logits are not computed for every position of a prompt; write value, or another site"
    width = _width_of(site, shard)
    if action.values is not None and width is not None and len(action.values) != width:
        yield f"action.values: has {len(action.values)} numbers, and {site.name} has {width} features; write {width}"


def _width_of(site: Site, shard: ModelShard) -> int | None:
    """Return the features of a built-in site, or the channels of a head; None if they are not known."""
    if site.axis in {ShardAxis.HEADS, ShardAxis.KEY_HEADS}:
        return shard.head_width
    if site.name not in BUILT_IN:
        return None
    if site.axis is ShardAxis.MLP:
        return shard.ffn * (2 if shard.gated else 1)
    return shard.vocabulary if site.name == LOGITS else shard.hidden


def _heads_of(site: Site, shard: ModelShard) -> int | None:
    return {ShardAxis.HEADS: shard.heads, ShardAxis.KEY_HEADS: shard.key_heads}.get(site.axis)


def _head_problems(perturbation: Perturbation, heads: int | None, name: str) -> Iterator[str]:
    if perturbation.heads is None:
        return
    if heads is None:
        yield f"heads: {name} has no heads; leave heads out"
        return
    for place, head in enumerate(perturbation.heads):
        if head >= heads:
            yield f"heads.{place}: {name} has no head {head}; write 0 to {heads - 1}"


def _storage_problems(perturbation: Perturbation, model: Any, shard: ModelShard) -> Iterator[str]:  # noqa: ANN401
    module, tensor = perturbation.parameter or "", perturbation.tensor
    if module == OUTPUT and shard.tied:
        yield f"parameter: the output layer of this model uses the word embeddings; write {EMBEDDING}"
        return
    if module in OUTSIDE_LAYERS:
        yield from _outside_problems(perturbation, model)
    else:
        layers = list(model.decoder.layers)
        names = dict(layers[0].named_parameters()) if layers else {}
        if layers and f"{module}.{tensor}" not in names:
            known = sorted({name.rpartition(".")[0] for name in names if name.endswith(f".{tensor}")})
            choices = ", ".join((*known, *(OUTSIDE_LAYERS if tensor == "weight" else ())))
            yield f"parameter: this model has no {module}.{tensor}; modules with a {tensor}: {choices}"
    yield from _part_problems(perturbation, shard)


def _outside_problems(perturbation: Perturbation, model: Any) -> Iterator[str]:  # noqa: ANN401
    module = perturbation.parameter
    if perturbation.layers is not None:
        yield f"layers: {module} belongs to no layer; leave layers out"
    learned = model.position_embedding_type == "learned_absolute"
    if module == "embedding.position_embeddings" and not learned:
        yield "parameter: this model has no learned positions; write another parameter"
    has_bias = module == "decoder.final_layernorm" and model.config.normalization == "LayerNorm"
    if perturbation.tensor == "bias" and not has_bias:
        yield f"tensor: {module} has no bias; write weight"


def _part_problems(perturbation: Perturbation, shard: ModelShard) -> Iterator[str]:
    module, part = perturbation.parameter or "", perturbation.part
    parts = {QKV: ("query", "key", "value"), FC1: ("gate", "up") if shard.gated else ()}.get(module, ())
    if part is not None and part not in parts:
        advice = f"write one of {', '.join(parts)}" if parts else "leave part out"
        yield f"part: {module} has no part {part}; {advice}"
    if perturbation.heads is None:
        return
    if module == QKV and part is None:
        yield "part: must be given with heads; write query, key or value"
    elif perturbation.tensor == "bias" and module == PROJECTION:
        yield f"heads: the bias of {module} belongs to no head; leave heads out"
    else:
        heads = {QKV: shard.heads if part == "query" else shard.key_heads, PROJECTION: shard.heads}.get(module)
        yield from _head_problems(perturbation, heads, module)
