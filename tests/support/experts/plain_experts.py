"""A GPT with a mixture of experts in plain torch, from the weights of a whole model: one expert after the other.

Shapes: N tokens, E experts, B microbatch, S sequence.
"""

import dataclasses
import math
from typing import Any

import torch
from torch.nn import functional

Weights = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainExperts:
    """Properties of the model that its weights do not show."""

    layers: int
    heads: int
    topk: int
    dense_layers: tuple[int, ...] = ()
    has_shared_gate: bool = False
    scores: str = "softmax"
    """softmax (over the chosen), pre (softmax over all, before the choice) or sigmoid (normalised over the chosen)."""
    aux: float = 0.0
    z: float = 0.0
    per_sequence: bool = False
    """The balancing loss is that of each sequence, and their mean is taken."""
    capacity: float | None = None

    def losses(self, weights: Weights, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Per-token losses [B, S], the further losses with their coefficients, and the load of each layer [E]."""
        embedding = weights["embedding.word_embeddings.weight"]
        stream = embedding[batch["tokens"]] + weights["embedding.position_embeddings.weight"][batch["position_ids"]]
        further, loads = torch.zeros(()), []
        for layer in range(self.layers):
            prefix = f"decoder.layers.{layer}."
            own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
            stream = stream + self._attention(own, _norm(stream, own["input_layernorm.weight"]))
            normed = _norm(stream, own["pre_mlp_layernorm.weight"])
            if layer in self.dense_layers:
                stream = stream + _gated(normed, own["mlp.linear_fc1.weight"], own["mlp.linear_fc2.weight"])
                continue
            output, loss, load = self._mixture(own, normed)
            stream, further = stream + output, further + loss
            loads.append(load)
        stream = _norm(stream, weights["decoder.final_layernorm.weight"])
        logits = stream @ weights.get("output_layer.weight", embedding).T
        tokens = functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return tokens, further, loads

    def _attention(self, own: Weights, normed: torch.Tensor) -> torch.Tensor:
        mixed = normed @ own["self_attention.linear_qkv.weight"].T
        mixed = mixed.reshape(*normed.shape[:2], self.heads, 3, -1)
        query, key, value = (mixed[..., part, :].transpose(1, 2) for part in range(3))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        attended = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
        output: torch.Tensor = attended.transpose(1, 2).flatten(2) @ own["self_attention.linear_proj.weight"].T
        return output

    def _mixture(self, own: Weights, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = normed.transpose(0, 1).flatten(0, 1)  # [S, B] as megatron-core: the order in which capacity is full
        logits = tokens @ own["mlp.router.weight"].T
        weight, all_scores = self._scores(logits)
        chosen = weight > 0
        if self.capacity is not None:
            capacity = math.ceil(len(tokens) * self.topk / logits.shape[1] * self.capacity)
            within = torch.zeros_like(chosen).scatter(0, weight.topk(min(capacity, len(tokens)), dim=0).indices, True)
            weight, taken = weight * within, chosen & within
        else:
            taken = chosen
        output = torch.zeros_like(tokens)
        for expert, (first, second) in enumerate(
            zip(own["mlp.experts.linear_fc1.weight"], own["mlp.experts.linear_fc2.weight"], strict=True)
        ):
            output = output + weight[:, expert : expert + 1] * _gated(tokens, first, second)
        if "mlp.shared_experts.linear_fc1.weight" in own:
            shared = _gated(tokens, *(own[f"mlp.shared_experts.linear_fc{part}.weight"] for part in (1, 2)))
            if self.has_shared_gate:
                shared = shared * torch.sigmoid(tokens @ own["mlp.shared_experts.gate_weight"].T)
            output = output + shared
        further = self.z * logits.logsumexp(-1).square().mean()
        further = further + self.aux * self._balance(all_scores, chosen, samples=len(normed))
        return output.reshape(-1, *normed.shape[::2]).transpose(0, 1), further, taken.sum(0)

    def _scores(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of the chosen experts, 0 elsewhere, and the scores of all [N, E]."""
        best = logits.topk(self.topk, dim=1).indices
        if self.scores == "sigmoid":
            open_scores = logits.sigmoid()
            part = open_scores.gather(1, best)
            part = part / part.sum(-1, keepdim=True) if self.topk > 1 else part
            every = open_scores / open_scores.sum(-1, keepdim=True)
        else:
            every = logits.softmax(-1)
            part = every.gather(1, best) if self.scores == "pre" else logits.gather(1, best).softmax(-1)
        return torch.zeros_like(logits).scatter(1, best, part), every

    def _balance(self, scores: torch.Tensor, chosen: torch.Tensor, *, samples: int) -> torch.Tensor:
        """The loss of Switch Transformers: experts x sum of (mean score x share of the choices), per choice."""
        if self.per_sequence:
            parts = zip(*(part.reshape(-1, samples, part.shape[1]).unbind(1) for part in (scores, chosen)), strict=True)
            return torch.stack([self._balance_of(*part) for part in parts]).mean()
        return self._balance_of(scores, chosen)

    def _balance_of(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        fractions = chosen.float().mean(0) / self.topk
        return scores.shape[1] * (scores.mean(0) * fractions).sum()


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _gated(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ first.T).chunk(2, -1)
    return (functional.silu(gate) * up) @ second.T
