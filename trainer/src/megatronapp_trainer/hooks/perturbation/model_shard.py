"""Sizes of the whole model, and the part of each that a rank holds."""

import dataclasses
import itertools
from typing import Any

import torch

from megatronapp_trainer.hooks.sites import ShardAxis, Site
from megatronapp_trainer.parallel.layout import Layout

Span = tuple[int, int]
"""First layer, and the one after the last."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShard:
    """Sizes of the model, and this rank's place among the tensor ranks."""

    layers: int
    heads: int
    key_heads: int
    head_width: int
    hidden: int
    ffn: int
    gated: bool
    vocabulary: int
    """Number of tokens without padding."""
    tied: bool
    """The output layer uses the word embeddings."""
    tensor_rank: int
    tensor_size: int
    stages: tuple[Span, ...]
    """Layers of each pipeline stage; empty where ranks hold several chunks."""

    @property
    def first_head(self) -> int:
        """First query head of this rank."""
        return self.tensor_rank * self.heads // self.tensor_size

    @property
    def first_key_head(self) -> int:
        """First key head of this rank; where there are fewer than ranks, several ranks hold the same one."""
        return self.tensor_rank * self.key_heads // self.tensor_size


def model_shard_of(model: Any, layout: Layout, *, vocabulary: int) -> ModelShard:  # noqa: ANN401 - GPTModel
    """Derive the shard of the rank that holds this model."""
    config = model.config
    return ModelShard(
        layers=config.num_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_query_groups,
        head_width=config.kv_channels,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        gated=bool(config.gated_linear_unit),
        vocabulary=vocabulary,
        tied=bool(model.share_embeddings_and_output_weights),
        tensor_rank=layout.tensor_rank,
        tensor_size=layout.tensor_size,
        stages=_layers_of_stages(config, layout.pipeline_size) if layout.virtual_size == 1 else (),
    )


def _layers_of_stages(config: Any, stages: int) -> tuple[Span, ...]:  # noqa: ANN401 - TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    ends = itertools.accumulate(get_num_layers_to_build(config, pp_rank=stage) for stage in range(stages))
    return tuple(itertools.pairwise((0, *ends)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlobalFeatures:
    """Global coordinates of the axes of a site after its tokens; both broadcast against the value of one token."""

    features: torch.Tensor
    """Feature, or channel within the head; int64."""
    heads: torch.Tensor | None
    """Head, or key head; None: the site has no heads, and the noise uses 0."""


def global_features(site: Site, shape: torch.Size, shard: ModelShard, device: torch.device) -> GlobalFeatures:
    """Return the coordinates of a value of this shape without its axis of tokens: [features] or [heads, channels]."""
    if site.axis in {ShardAxis.HEADS, ShardAxis.KEY_HEADS}:
        first = shard.first_head if site.axis is ShardAxis.HEADS else shard.first_key_head
        heads = torch.arange(first, first + shape[0], device=device)
        return GlobalFeatures(features=torch.arange(shape[1], device=device), heads=heads[:, None])
    return GlobalFeatures(features=_flat_features(site.axis, shape.numel(), shard, device).view(shape), heads=None)


def _flat_features(axis: ShardAxis, count: int, shard: ModelShard, device: torch.device) -> torch.Tensor:
    local = torch.arange(count, device=device)
    if axis is ShardAxis.WHOLE:
        return local
    if axis is ShardAxis.MLP and shard.gated:
        return gated_index(local, count, shard)
    return local + shard.tensor_rank * count


def gated_index(local: torch.Tensor, count: int, shard: ModelShard) -> torch.Tensor:
    """Return global indices of a gated MLP's inner features: a shard holds [gate; up], and so does the whole."""
    half = count // 2
    is_up = local >= half
    within = torch.where(is_up, local - half, local) + shard.tensor_rank * half
    return torch.where(is_up, within + shard.ffn, within)
