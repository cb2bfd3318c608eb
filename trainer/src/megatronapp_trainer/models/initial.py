"""Initial weights as a function of (seed, global parameter name) alone, so that every layout starts equal.

Each rank draws the whole tensor of a parameter from a separate generator and keeps its shard. The draw is done on the
CPU in fp32 on any device, so that GPUs and CPUs start equal, too.
"""

import collections
import concurrent.futures
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import torch

from megatronapp_trainer.config import ModelConfig
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.utils.keyed_generator import generator_of

MOST_DRAWN_AT_ONCE = 4
"""Tensors of which a rank has the whole in memory at the same time."""
_LAYER = re.compile(r"(?<=\.layers\.)(\d+)(?=\.)")
_ONES = re.compile(r"(layernorm|layer_norm)(\.|_)weight$")
_EXPERTS = ".mlp.experts."
"""Part of the names of weights of experts, which have an axis of experts before those of a matrix."""
_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")
"""Projections back into the residual stream: their deviation shrinks with depth."""


def global_names(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:  # noqa: ANN401 - GPTModel
    """Yield every parameter of a chunk under its name in the unsplit model."""
    first_layer = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    tied_copy = model.share_embeddings_and_output_weights and not model.pre_process
    for name, parameter in model.named_parameters():
        if tied_copy and name == "output_layer.weight":
            yield "embedding.word_embeddings.weight", parameter
        else:
            yield _LAYER.sub(lambda match: str(int(match[1]) + first_layer), name), parameter


def initialize_weights(model: Any, config: ModelConfig, *, seed: int, layout: Layout) -> None:  # noqa: ANN401
    """Fill all parameters of a model chunk in place, several at a time: torch draws a tensor on one processor."""

    @torch.no_grad()
    def fill(named: tuple[str, torch.nn.Parameter]) -> None:
        name, parameter = named
        parameter.copy_(initial_shard(name, parameter, config, seed=seed, layout=layout))

    with concurrent.futures.ThreadPoolExecutor(min(MOST_DRAWN_AT_ONCE, len(os.sched_getaffinity(0)))) as threads:
        collections.deque(threads.map(fill, global_names(model)), maxlen=0)  # raises the first error


def initial_shard(
    name: str, parameter: torch.nn.Parameter, config: ModelConfig, *, seed: int, layout: Layout
) -> torch.Tensor:
    """Return this rank's part of the initial value of the parameter with this global name, in fp32 on the CPU."""
    if name.endswith("bias"):
        return torch.zeros(parameter.shape)
    if _EXPERTS in name:
        return _initial_experts(name, parameter, config, seed=seed, layout=layout)
    if _ONES.search(name):
        return torch.ones(parameter.shape)
    axis = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]
    shape = list(parameter.shape)
    if axis is not None:
        shape[axis] *= layout.tensor_size
    whole = torch.empty(shape).normal_(0.0, _deviation(name, config), generator=generator_of(f"{seed}:{name}"))
    if axis is None or layout.tensor_size == 1:
        return whole
    return _shard(whole, axis, layout, halves=config.swiglu and "linear_fc1" in name)


def _initial_experts(
    name: str, parameter: torch.nn.Parameter, config: ModelConfig, *, seed: int, layout: Layout
) -> torch.Tensor:
    """Return the initial weights of this rank's experts, each drawn by its number among all experts."""
    experts, *shape = parameter.shape
    axis = parameter.partition_dim - 1  # type: ignore[attr-defined]
    shape[axis] *= layout.tensor_size
    first = layout.expert_rank * experts
    deviation = _deviation(name, config)
    shards = []
    for expert in range(first, first + experts):
        generator = generator_of(f"{seed}:{name}:{expert}")
        whole = torch.empty(shape).normal_(0.0, deviation, generator=generator)
        shards.append(_shard(whole, axis, layout, halves=config.swiglu and "linear_fc1" in name))
    return torch.stack(shards)


def _shard(whole: torch.Tensor, axis: int, layout: Layout, *, halves: bool) -> torch.Tensor:
    """Return the shard of one tensor rank; gate and up projection of a gated MLP are split separately."""
    parts = whole.chunk(2, axis) if halves else (whole,)
    return torch.cat([part.chunk(layout.tensor_size, axis)[layout.tensor_rank] for part in parts], axis)


def _deviation(name: str, config: ModelConfig) -> float:
    if name.endswith(_OUTPUTS):
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    return config.init_method_std
