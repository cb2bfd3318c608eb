"""Losses and load of experts in one step, over all ranks.

megatron-core sums the values of its losses by layer; the routers count tokens. Both travel with the reduction of the
loss, so that they cost no collective and no wait of their own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.parallel.layout import Layout

_LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names of balancing losses in the log, as megatron-core gives them."""
_Z_LOSS = "z_loss"


MAX_PUBLISHED = 1024
"""Numbers of the load that the progress document has at most, which is small: a fourth of it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStatistics:
    """Figures of one step over all ranks."""

    losses: Mapping[str, float]
    """Mean of each loss of the routers over microbatches and layers with experts, without its coefficient."""
    layers: tuple[int, ...]
    """Layers with experts, counted from 0."""
    load: tuple[tuple[int, ...], ...]
    """Tokens that each expert has taken, by layer."""
    dropped: float
    """Share of the choices of the routers that were dropped for lack of capacity."""

    @property
    def imbalance(self) -> float:
        """Return the load of the fullest expert of any layer over the mean load in its layer; 1 is balanced."""
        return max((max(counts) * len(counts) / max(sum(counts), 1) for counts in self.load), default=1.0)

    def to_json(self) -> dict[str, Any]:
        """Return the part of the progress document: loads over the mean of their layer, in thousandths.

        Of models with more experts than fit, only the layers with the largest load are there.
        """
        layers = [
            (layer, [round(1000 * count * len(counts) / max(sum(counts), 1)) for count in counts])
            for layer, counts in zip(self.layers, self.load, strict=True)
        ]
        fitting = max(1, MAX_PUBLISHED // max(len(self.load[0]), 1)) if self.load else 0
        fullest = sorted(layers, key=lambda entry: -max(entry[1]))[:fitting]
        return {
            "losses": dict(self.losses),
            "dropped": self.dropped,
            "imbalance": self.imbalance,
            "layers": [{"layer": layer, "load": load} for layer, load in sorted(fullest)],
        }


class ExpertCounter:
    """Takes the figures of this rank's routers, and reads their sum over all ranks."""

    def __init__(self, config: TrainerConfig, layout: Layout, chunks: Sequence[Any]) -> None:
        """Find the routers of all chunks of a model with experts."""
        from megatronapp_trainer.models.experts.router import CountingRouter

        model = config.model
        assert model.num_experts is not None
        self._experts, self._topk = model.num_experts, model.moe_router_topk
        self._layers = tuple(layer for layer, has in enumerate(model.expert_layers(model.num_layers)) if has)
        self._routers = {
            module.layer_number - 1: module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, CountingRouter)
        }
        shared = layout.data_size * layout.tensor_size
        self._parts = {_LOGGED[name]: layout.data_size for name in model.balancing_losses}
        if "global_aux_loss" in model.balancing_losses:
            self._parts[_LOGGED["global_aux_loss"]] = 1
        if model.moe_z_loss_coeff is not None:
            self._parts[_Z_LOSS] = shared

    def take(self, device: torch.device) -> torch.Tensor:
        """Return the figures of the step on this rank, fp64 [losses + layers x experts], and reset them."""
        from megatron.core.transformer.moe.moe_utils import (
            clear_aux_losses_tracker,
            get_moe_layer_wise_logging_tracker,
        )

        tracker = get_moe_layer_wise_logging_tracker()
        zero = torch.zeros((), dtype=torch.float64, device=device)
        losses = [tracker[name]["values"].double().sum() if name in tracker else zero for name in self._parts]
        clear_aux_losses_tracker()
        none = torch.zeros(self._experts, dtype=torch.float64, device=device)
        loads = [
            self._routers[layer].take_load().double() if layer in self._routers else none for layer in self._layers
        ]
        return torch.cat([torch.stack([*losses, zero])[:-1], *loads])

    def read(self, sums: Sequence[float], *, microbatches: int, tokens: int) -> ExpertStatistics:
        """Return the figures from their sums over all ranks.

        `microbatches`: of each replica; `tokens`: of all replicas, padding included.
        """
        names = list(self._parts)
        counted = microbatches * len(self._layers)
        losses = {name: total / (counted * self._parts[name]) for name, total in zip(names, sums, strict=False)}
        counts = [round(value) for value in sums[len(names) :]]
        load = tuple(tuple(counts[at : at + self._experts]) for at in range(0, len(counts), self._experts))
        chosen = tokens * self._topk * len(self._layers)
        return ExpertStatistics(
            losses=losses, layers=self._layers, load=load, dropped=max(0.0, 1 - sum(counts) / max(chosen, 1))
        )


def expert_counter(config: TrainerConfig, layout: Layout, chunks: Sequence[Any]) -> ExpertCounter | None:
    """Return the counter of a model with experts; None for others."""
    return None if config.model.num_experts is None else ExpertCounter(config, layout, chunks)
