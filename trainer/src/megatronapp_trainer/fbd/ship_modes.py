"""Recomputation that belongs to each mode of shipping, and its setting in the modules of megatron-core.

Both roles run their passes under one setting: autograd then saves less on the forward rank, and the graph of the
backward rank recomputes the rest.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.config.fbd import ShipMode


class Recomputation(NamedTuple):
    """Fields of megatron-core's TransformerConfig that say what the backward pass recomputes."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None


def recomputation_of(config: TrainerConfig, mode: ShipMode) -> Recomputation:
    """Return the recomputation of a mode; without `--fbd-ship` it is that of the recomputation flags."""
    if config.fbd.fbd_ship is None:
        precision = config.precision
        return Recomputation(precision.granularity, precision.recompute_method, precision.recompute_num_layers)
    if mode is ShipMode.FULL:
        return Recomputation("full", "uniform", 1)
    return Recomputation("selective") if mode is ShipMode.SELECTIVE else Recomputation()


def set_recomputation(chunks: list[Any], recomputation: Recomputation) -> None:
    """Set what the backward passes of model chunks recompute, in graphs and forward passes from now on.

    megatron-core reads `full` from its configuration in each pass, and `selective` when it builds an attention layer.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        core_config: Any = getattr(module, "config", None)
        if hasattr(core_config, "recompute_granularity"):
            core_config.recompute_granularity = recomputation.granularity
            core_config.recompute_method = recomputation.method
            core_config.recompute_num_layers = recomputation.num_layers
        if hasattr(module, "checkpoint_core_attention"):
            module.checkpoint_core_attention = recomputation.granularity == "selective"


def recompute_final_norms(chunks: list[Any]) -> None:
    """Let backward passes recompute the norm after the last layer from its input, under any recomputation.

    A CPU and a GPU do not save the same for it: statistics of LayerNorm are bf16 on a CPU if its input is, and float32
    on a GPU, and RMSNorm is several operations on a CPU. All other tensors saved outside of layers are equal on both.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        norm = getattr(module, "final_layernorm", None)
        if norm is not None:
            norm.forward = functools.partial(_recomputed, norm, norm.forward)


def _recomputed(
    norm: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    from megatron.core.tensor_parallel import checkpoint

    if not norm.training:
        return forward(hidden)
    output: torch.Tensor = checkpoint(forward, False, hidden)
    return output


class ShipSwitch:
    """Puts the chunks of a rank under the recomputation of the mode that a step has."""

    def __init__(self, config: TrainerConfig, chunks: list[Any]) -> None:
        """Take the chunks, which have the recomputation of the flags until `set`."""
        self._config = config
        self._chunks = chunks
        self._mode: ShipMode | None = None

    def set(self, mode: ShipMode) -> None:
        """Put the chunks under a mode: their graphs, forward passes and recomputed passes from now on."""
        if mode is not self._mode:
            set_recomputation(self._chunks, recomputation_of(self._config, mode))
            self._mode = mode
