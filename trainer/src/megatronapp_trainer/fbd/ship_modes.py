"""Recomputation that belongs to each mode of shipping, and its setting in the modules of megatron-core.

Both roles run their passes under one setting: autograd then saves less on the forward rank, and the graph of the
backward rank recomputes the rest.
"""

from typing import Any, NamedTuple

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
