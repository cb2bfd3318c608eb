"""Flags of numerics and recomputation."""

import dataclasses

from megatronapp_trainer.config.fields import option


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Precision and recomputation of activations."""

    bf16: bool = option(False, "bf16 weights and activations; master weights and gradient reduction stay in fp32")
    recompute_activations: bool = option(False, "short for --recompute-granularity selective")
    recompute_granularity: str | None = option(
        None, "what the backward pass computes again: whole layers, or attention only", choices=("full", "selective")
    )
    recompute_method: str | None = option(None, "which layers, with full", choices=("uniform", "block"))
    recompute_num_layers: int | None = option(
        None, "layers per recomputed group (uniform) or in all (block), with full", bounds="[1, inf)"
    )
    deterministic_mode: bool = option(False, "refuse operations whose result depends on timing")

    @property
    def granularity(self) -> str | None:
        """Return full, selective or None."""
        return "selective" if self.recompute_activations else self.recompute_granularity
