"""A pre-norm BERT written down with torch alone: its losses, from the weights of a whole model.

B samples, S tokens, H heads, D channels of a head.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainBert:
    """Properties of the model that its weights do not show."""

    layers: int
    hidden: int
    heads: int

    def losses(self, weights: Mapping[str, torch.Tensor], batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the loss of each token [B, S] and that of each sample's sentence order [B]."""
        stream_BSE = self._embedded(weights, batch)
        hidden_B11S = (batch["padding_mask"] == 0)[:, None, None, :]
        for layer in range(self.layers):
            prefix = f"encoder.layers.{layer}."
            normed = self._norm(weights, prefix + "input_layernorm", stream_BSE)
            stream_BSE = stream_BSE + self._attention(weights, prefix + "self_attention.", normed, hidden_B11S)
            normed = self._norm(weights, prefix + "pre_mlp_layernorm", stream_BSE)
            inner = functional.gelu(_linear(weights, prefix + "mlp.linear_fc1", normed))
            stream_BSE = stream_BSE + _linear(weights, prefix + "mlp.linear_fc2", inner)
        final_BSE = self._norm(weights, "encoder.final_layernorm", stream_BSE)
        transformed = functional.gelu(_linear(weights, "lm_head.dense", final_BSE))
        transformed = self._norm(weights, "lm_head.layer_norm", transformed)
        embedding = weights["embedding.word_embeddings.weight"]
        table = weights.get("output_layer.weight", embedding)
        logits_BSV = functional.linear(transformed, table, weights["output_layer.bias"])
        token_losses = functional.cross_entropy(logits_BSV.transpose(1, 2), batch["labels"], reduction="none")
        pooled = torch.tanh(_linear(weights, "pooler.dense", final_BSE[:, 0]))
        order = functional.cross_entropy(_linear(weights, "binary_head", pooled), batch["swapped"], reduction="none")
        return token_losses, order

    def _embedded(self, weights: Mapping[str, torch.Tensor], batch: Mapping[str, Any]) -> torch.Tensor:
        positions = weights["embedding.position_embeddings.weight"][: batch["tokens"].shape[1]]
        own = weights["embedding.word_embeddings.weight"][batch["tokens"]]
        return own + positions + weights["embedding.tokentype_embeddings.weight"][batch["token_types"]]

    def _attention(
        self, weights: Mapping[str, torch.Tensor], prefix: str, values: torch.Tensor, hidden_B11S: torch.Tensor
    ) -> torch.Tensor:
        mixed = _linear(weights, prefix + "linear_qkv", values)
        query, key, value = mixed.reshape(*values.shape[:2], self.heads, 3, self.hidden // self.heads).unbind(3)
        scores_BHSS = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(self.hidden // self.heads)
        probabilities = scores_BHSS.masked_fill(hidden_B11S, -math.inf).softmax(-1)
        return _linear(
            weights, prefix + "linear_proj", torch.einsum("bhij,bjhd->bihd", probabilities, value).flatten(2)
        )

    def _norm(self, weights: Mapping[str, torch.Tensor], name: str, values: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(values, (self.hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"])


def _linear(weights: Mapping[str, torch.Tensor], name: str, values: torch.Tensor) -> torch.Tensor:
    return functional.linear(values, weights[f"{name}.weight"], weights[f"{name}.bias"])
