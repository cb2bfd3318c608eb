"""Modules of a model's layers and its loss on the kernels of this folder, with megatron-core's names and state dicts.

Shapes: S sequence, B microbatch, V vocabulary of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.mlp import MLP

from megatronapp_trainer.models.kernels.activations import Activation, bias_activation
from megatronapp_trainer.models.kernels.cross_entropy import cross_entropy
from megatronapp_trainer.models.kernels.norms import norm
from megatronapp_trainer.models.kernels.residual import bias_residual

Branch = tuple[torch.Tensor, torch.Tensor | None]
"""Output of a branch of the residual stream, and the bias that is not added yet."""


class FusedLayerNorm(torch.nn.LayerNorm):
    """LayerNorm in one kernel each way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise over the last axis."""
        return norm(input, self.weight, self.bias, self.eps)


class FusedRMSNorm(torch.nn.RMSNorm):
    """RMSNorm in one kernel each way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise over the last axis."""
        assert self.eps is not None
        return norm(input, self.weight, None, self.eps)


class FusedMLP(MLP):  # type: ignore[misc] # megatron-core carries no types
    """A dense MLP whose bias and activation are one kernel each way."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of megatron-core
        super().__init__(config, *args, **kwargs)
        exact = config.activation_func is torch.nn.functional.gelu
        plain = Activation.GELU if exact else Activation.GELU_TANH
        self._kind = Activation.SWIGLU if config.gated_linear_unit else plain

    def forward(self, hidden_states: torch.Tensor, **_options: Any) -> Branch:  # noqa: ANN401 - of experts and inference
        """Compute [S, B, H] -> [S, B, H] and the bias that is not added yet."""
        inner, bias = self.linear_fc1(hidden_states)
        output, output_bias = self.linear_fc2(bias_activation(inner, bias, self._kind))
        return output, output_bias


def fused_bias_dropout_add(training: bool, fused: bool) -> Callable[[Branch, torch.Tensor, float], torch.Tensor]:
    """Return the function that adds a branch to the residual stream, in place of megatron-core's of this signature.

    Where dropout draws, it is megatron-core's.
    """
    with_dropout = get_bias_dropout_add(training, fused)

    def add(branch: Branch, residual: torch.Tensor, probability: float) -> torch.Tensor:
        output, bias = branch
        if (training and probability > 0) or residual.dtype != output.dtype:
            dropped: torch.Tensor = with_dropout(branch, residual, probability)
            return dropped
        return bias_residual(output, bias, residual)

    return add


class FusedLoss:
    """Mixin of a model that computes the loss of its tokens from the logits in one kernel each way."""

    pg_collection: Any

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Compute the loss of each token, fp32 [B, S], from labels [B, S] and logits [S, B, V]."""
        group = self.pg_collection.tp
        first = group.rank() * logits.size(-1)
        losses = cross_entropy(logits, labels.t(), first=first, group=group if group.size() > 1 else None)
        return losses.t().contiguous()


def with_fused_loss(model: type) -> type:
    """Return the class of a language model whose loss is `FusedLoss`."""
    return type(f"{model.__name__}WithFusedLoss", (FusedLoss, model), {})
