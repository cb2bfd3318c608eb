"""megatron-core's router, which also counts the tokens of each expert."""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter


class CountingRouter(TopKRouter):  # type: ignore[misc] # megatron-core carries no types
    """TopKRouter with the load of its experts, summed over the passes that train."""

    load: torch.Tensor
    """Tokens that each expert has taken since `take_load`, int64 [experts]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of megatron-core
        super().__init__(*args, **kwargs)
        self.register_buffer("load", torch.zeros(self.num_experts, dtype=torch.int64), persistent=False)

    def _maintain_float32_expert_bias(self) -> None:
        """Keep the counts in fp32, too, that move the bias and weight the loss of all replicas.

        megatron-core (0.16) calls this before each pass for the bias alone. Counts of 16 bits are inexact, and
        infinite in fp16 from 65,520 tokens on.
        """
        super()._maintain_float32_expert_bias()
        for name in ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"):
            count = getattr(self, name, None)
            if count is not None:
                count.data = count.data.float()

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the logits of tokens [..., H] -> [..., experts], in the precision of --moe-router-dtype.

        In place of megatron-core's function, which fails where Transformer Engine is not installed (0.16).
        """
        names = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = names.get(self.config.moe_router_dtype, input.dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype))

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        *args: Any,  # noqa: ANN401 - those of megatron-core
        **kwargs: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Add a loss to the gradients of activations [tokens, experts].

        With --calculate-per-token-loss all gradients are divided by the tokens of a step, so that the loss of a
        microbatch is multiplied by its tokens; megatron-core (0.16) takes those of this tensor rank, and for
        ``seq_aux_loss`` those of a sequence.
        """
        kwargs["valid_token_count"] = self._tokens_of_microbatch(activation)
        attached: torch.Tensor = super().attach_and_log_load_balancing_loss(activation, *args, **kwargs)
        return attached

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Add the z-loss to the gradients of logits [tokens, experts]; per token as the losses of the load."""
        coefficient = self.config.moe_z_loss_coeff
        is_counted = coefficient is not None and self.training and torch.is_grad_enabled()
        if not (self.calculate_per_token_loss and is_counted):
            same: torch.Tensor = super().apply_z_loss(logits, padding_mask=padding_mask)
            return same
        part = coefficient / self.tp_cp_group.size()
        loss = z_loss_func(logits, part)
        save_to_aux_losses_tracker("z_loss", loss / part, self.layer_number, self.config.num_layers)
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(logits, loss * self._tokens_of_microbatch(logits))
        return attached

    def _tokens_of_microbatch(self, rows: torch.Tensor) -> int:
        """Return the tokens of all tensor ranks; each has as many rows."""
        tokens: int = rows.shape[0] * self.tp_cp_group.size()
        return tokens

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token: scores and bool [tokens, experts].

        Counts passes with gradients alone: neither evaluations, nor the first of two passes where layers are
        recomputed.
        """
        scores, chosen = super().routing(logits, padding_mask=padding_mask)
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                taken = chosen & (scores > 0) if self.config.moe_pad_expert_input_to_capacity else chosen
                self.load += taken.sum(0)
        return scores, chosen

    def take_load(self) -> torch.Tensor:
        """Return the load and set it to 0."""
        load = self.load.clone()
        self.load.zero_()
        return load
