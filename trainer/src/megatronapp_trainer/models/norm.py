"""torch's norms with the mark that sequence parallelism needs; megatron-core's wrapper refuses it."""

from typing import Any

import torch


class TorchNorm:
    """Factory of LayerNorm or RMSNorm over the last axis, by ``config.normalization``, where a spec needs a class.

    Under sequence parallelism each rank sees only its slice, so the parameters are marked for the reduction over the
    tensor group that finalize_model_grads does.
    """

    def __new__(  # type: ignore[misc] # a spec's builder may give any module
        cls,
        config: Any,  # noqa: ANN401 - TransformerConfig
        hidden_size: int,
        eps: float = 1e-5,
        **_options: Any,  # noqa: ANN401 - of fused norms
    ) -> torch.nn.Module:
        """Return the norm module itself."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        return _marked(kind(hidden_size, eps=eps), config)


class FusedNorm:
    """Factory like `TorchNorm` of norms in one kernel each way."""

    def __new__(  # type: ignore[misc] # a spec's builder may give any module
        cls,
        config: Any,  # noqa: ANN401 - TransformerConfig
        hidden_size: int,
        eps: float = 1e-5,
        **_options: Any,  # noqa: ANN401 - of fused norms
    ) -> torch.nn.Module:
        """Return the norm module itself."""
        from megatronapp_trainer.models.kernels.modules import FusedLayerNorm, FusedRMSNorm

        kind = FusedRMSNorm if config.normalization == "RMSNorm" else FusedLayerNorm
        return _marked(kind(hidden_size, eps=eps), config)


def _marked(norm: torch.nn.Module, config: Any) -> torch.nn.Module:  # noqa: ANN401 - TransformerConfig
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
