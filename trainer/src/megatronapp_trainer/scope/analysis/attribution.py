"""Direct logit attribution: what each component of the residual stream adds to the logit of a token.

The final residual is a sum of what embedding, heads, MLPs and biases wrote; with the scale of the final norm at its
true value the logit is a linear function of it, so each summand has its own contribution (Elhage et al. 2021,
"A Mathematical Framework for Transformer Circuits"). The last stage sends the direction to the other stages; each rank
attributes the components that it holds. All is computed with 32 bits.

Shapes: H hidden size, A heads of this rank, D channels of a head, F neurons of this rank.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_common.scope.analysis_requests import AttributionRequest
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.hooks.sites import Retention, Site, site_of
from megatronapp_trainer.scope.analysis.chunk_values import AnalysisMemory, ChunkValues
from megatronapp_trainer.scope.analysis.logit_lens import FP32_BYTES, RESIDUAL, Unembed
from megatronapp_trainer.scope.analysis.rank_exchange import RankExchange
from megatronapp_trainer.scope.capture.rank_shard import RankShard

CONTEXT = Site(
    name="attention context",
    where="self_attention.core_attention",
    take=lambda _inputs, output: output.squeeze(1),
    retention=Retention.ALIVE,
)
"""Weighted sums of values of all heads, before the output projection."""
NEURONS = Site(
    name="neurons",
    where="mlp.linear_fc2",
    take=lambda inputs, _output: inputs[0].squeeze(1),
    retention=Retention.ALIVE,
)
"""Activations of the MLP: after the activation, before fc2."""
BLOCK_NUMBERS = 1 << 22
"""Most numbers of a weight that are copied with 32 bits at a time."""
EMBEDDING, ATTENTION_OUTPUT, MLP_OUTPUT = site_of("embedding"), site_of("attention_output"), site_of("mlp2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerContributions:
    """Contributions of the components of one layer that a rank holds; of replicated ones only tensor rank 0's count."""

    heads: list[float]
    attention_bias: float
    mlp: float
    mlp_bias: float
    neurons: list[tuple[int, float, float]]
    """Index among all neurons of the layer, activation and contribution of the strongest ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributionPart:
    """Contributions that one rank has computed."""

    layers: dict[int, LayerContributions]
    first_head: int
    is_first_of_tensor: bool
    embedding: float | None = None
    """Contribution of the embedding, on the first stage."""
    constant: float | None = None
    """Contribution of the final norm's bias, on the last stage."""
    logit: float | None = None
    """Logit that the model itself computes, or the difference of two; on the last stage."""


class AttributionAnalysis:
    """The attribution on one rank."""

    sites: Sequence[Site] = (EMBEDDING, CONTEXT, ATTENTION_OUTPUT, NEURONS, MLP_OUTPUT, RESIDUAL)
    whole_sites: Sequence[Site] = ()

    def __init__(
        self,
        request: AttributionRequest,
        shard: RankShard,
        exchange: RankExchange,
        unembed: Unembed,
        model: Any,  # noqa: ANN401 - GPTModel
    ) -> None:
        self._request = request
        self._shard = shard
        self._exchange = exchange
        self._unembed = unembed
        self._model = model

    def positions(self, segment: Segment) -> list[int]:
        """Return the requested row if a segment has it."""
        return [self._request.row] if segment.start <= self._request.row < segment.end else []

    def memory(self, segment: Segment) -> AnalysisMemory:
        """Return the memory of one row of each site, and of a block of weights with 32 bits."""
        shard = self._shard
        layers = shard.layers[1] - shard.layers[0]
        row = 4 * shard.hidden + shard.ffn
        logits = shard.vocabulary if self._exchange.stage == self._exchange.last_stage else 0
        block = max(BLOCK_NUMBERS, shard.hidden) + shard.ffn + shard.hidden
        return AnalysisMemory(values=layers * row * FP32_BYTES, work=2 * FP32_BYTES * (block + logits))

    @torch.no_grad()
    def read(self, chunk: ChunkValues) -> AttributionPart:
        """Return the contributions of this rank's components."""
        ends = self._ends(chunk)
        direction_H = ends.pop("direction")
        embedding = None
        if self._exchange.stage == 0:
            embedding = _dot(chunk.value(EMBEDDING)[0], direction_H)
        layers = {layer.layer_number - 1: layer for layer in self._model.decoder.layers}
        return AttributionPart(
            layers={number: self._layer(chunk, number, layer, direction_H) for number, layer in layers.items()},
            first_head=self._shard.heads[0],
            is_first_of_tensor=self._shard.is_first_of_tensor,
            embedding=embedding,
            **ends,
        )

    def _ends(self, chunk: ChunkValues) -> dict[str, Any]:
        """Return the direction, and on the last stage the constant and the model's own logit."""
        last = self._exchange.last_stage
        if self._exchange.stage != last:
            weight = next(self._model.decoder.parameters())
            direction_H = torch.empty(self._shard.hidden, dtype=torch.float32, device=weight.device)
            return {"direction": self._exchange.receive(direction_H, last)}
        residual_1H = chunk.value(RESIDUAL, max(chunk.layers(RESIDUAL)))
        logits_V = self._unembed(residual_1H)[0].float()
        logit = float(logits_V[self._request.token])
        if self._request.against is not None:
            logit -= float(logits_V[self._request.against])
        direction_H, constant = self._direction(residual_1H[0].float())
        for stage in range(last):
            self._exchange.send(direction_H, stage)
        return {"direction": direction_H, "constant": constant, "logit": logit}

    def _direction(self, residual_H: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the gradient of the logit at a frozen scale of the final norm, and what the norm's bias adds."""
        config, norm = self._model.config, self._model.decoder.final_layernorm
        token_H = self._unembedding(self._request.token)
        if self._request.against is not None:
            token_H = token_H - self._unembedding(self._request.against)
        weight_H = norm.weight.float()
        if getattr(config, "layernorm_zero_centered_gamma", False):
            weight_H = weight_H + 1
        scaled_H = weight_H * token_H
        if config.normalization == "RMSNorm":
            scale = (residual_H.square().mean() + config.layernorm_epsilon).sqrt()
            return scaled_H / scale, 0.0
        # LayerNorm subtracts the mean, which is linear, too: of each summand, or of the direction once.
        scale = (residual_H.var(unbiased=False) + config.layernorm_epsilon).sqrt()
        return (scaled_H - scaled_H.mean()) / scale, _dot(norm.bias, token_H)

    def _unembedding(self, token: int) -> torch.Tensor:
        """Return fp32 [H] of a token, which one of the tensor ranks holds. Collective over them."""
        model = self._model
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        place = token - self._shard.tp * weight.size(0)
        row_H = torch.zeros(self._shard.hidden, dtype=torch.float32, device=weight.device)
        if 0 <= place < weight.size(0):
            row_H.copy_(weight[place])
        if self._shard.tensor_size > 1:
            from megatron.core import parallel_state

            dist.all_reduce(row_H, group=parallel_state.get_tensor_model_parallel_group())
        return row_H

    def _layer(self, chunk: ChunkValues, number: int, layer: Any, direction_H: torch.Tensor) -> LayerContributions:  # noqa: ANN401
        # W_O^T d once, instead of what each head writes into all of the hidden state.
        through_AD = through(layer.self_attention.linear_proj.weight, direction_H)
        context_AD = chunk.value(CONTEXT, number)[0].float()
        heads = (context_AD * through_AD).view(self._shard.heads[1] - self._shard.heads[0], -1).sum(1)
        bias, mlp_bias = chunk.bias(ATTENTION_OUTPUT, number), chunk.bias(MLP_OUTPUT, number)
        return LayerContributions(
            heads=heads.tolist(),
            attention_bias=0.0 if bias is None else _dot(bias, direction_H),
            mlp=_dot(chunk.value(MLP_OUTPUT, number)[0], direction_H),
            mlp_bias=0.0 if mlp_bias is None else _dot(mlp_bias, direction_H),
            neurons=self._neurons(chunk, number, layer, direction_H),
        )

    def _neurons(
        self,
        chunk: ChunkValues,
        number: int,
        layer: Any,  # noqa: ANN401
        direction_H: torch.Tensor,
    ) -> list[tuple[int, float, float]]:
        activation_F = chunk.value(NEURONS, number)[0].float()
        count = min(self._request.neurons, activation_F.numel())
        if count == 0:
            return []
        contribution_F = activation_F * through(layer.mlp.linear_fc2.weight, direction_H)
        ordered_F = contribution_F if self._request.order == "contribution" else activation_F
        places = ordered_F.abs().topk(count).indices
        first = self._shard.mlp[0]
        columns = (places.tolist(), activation_F[places].tolist(), contribution_F[places].tolist())
        return [
            (first + place, activation, contribution) for place, activation, contribution in zip(*columns, strict=True)
        ]


def through(weight_HF: torch.Tensor, direction_H: torch.Tensor) -> torch.Tensor:
    """Return fp32 [F]: the transposed weight times a direction, without a copy of the whole weight with 32 bits."""
    count = weight_HF.size(1)
    columns = max(1, BLOCK_NUMBERS // weight_HF.size(0))
    starts = range(0, count, columns)
    return torch.cat([weight_HF[:, first : first + columns].float().t() @ direction_H for first in starts])


def _dot(values: torch.Tensor, direction_H: torch.Tensor) -> float:
    return float(values.float() @ direction_H)
