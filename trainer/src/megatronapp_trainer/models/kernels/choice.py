"""Which parts of a model run in our own Triton kernels, and which in plain torch."""

import dataclasses
import importlib.util
import logging

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.config.rules.graphs import reasons_against_graphs
from megatronapp_trainer.device import Device
from megatronapp_trainer.device.compiling import can_compile

log = logging.getLogger(__name__)
WIDEST_NORM = 16384
"""Largest width of the norm's kernel, which has a whole row in registers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FusedParts:
    """Parts of a model that run as kernels in Triton; false: in plain torch."""

    norm: bool = False
    activation: bool = False
    residual: bool = False
    cross_entropy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the fused parts."""
        return tuple(field.name.replace("_", " ") for field in dataclasses.fields(self) if getattr(self, field.name))


def reason_against_kernels(config: TrainerConfig, *, is_cuda: bool, implementation: str) -> str | None:
    """Return why none of our own Triton kernels is used; None if they can be."""
    if not is_cuda:
        return "there is no GPU"
    if implementation != "torch":
        return f"--transformer-impl {implementation}"
    if config.fbd.enabled:
        return "--forward-backward-disaggregating ships the operations of torch"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None if can_compile() else "no kernel can be compiled here"


def launches_are_replayed(config: TrainerConfig) -> bool:
    """Return whether passes are CUDA graphs. Without them each launch of a small kernel of Triton costs the host more
    than the kernel saves on the device, and the parts between the matrix products stay in plain torch.
    """
    return not reasons_against_graphs(config)


def fused_parts(config: TrainerConfig, device: Device, implementation: str) -> FusedParts:
    """Choose the parts to fuse in training, by flags and device, and log the choice."""
    reason = reason_against_kernels(config, is_cuda=device.is_cuda, implementation=implementation)
    if reason is not None:
        log.info("kernels: plain torch, as %s", reason)
        return FusedParts()
    model, flags = config.model, config.kernels
    replayed = launches_are_replayed(config)
    parts = FusedParts(
        norm=replayed and flags.persist_layer_norm and model.hidden_size <= WIDEST_NORM,
        activation=replayed and (flags.bias_swiglu_fusion if model.swiglu else flags.bias_gelu_fusion),
        residual=replayed and flags.bias_dropout_fusion,
        cross_entropy=flags.fused_cross_entropy,
    )
    log.info("kernels: Triton for %s; plain torch for the rest", ", ".join(parts.names) or "nothing")
    return parts
