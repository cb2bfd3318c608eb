"""A GPT written down with torch alone, from the weights of a whole model: no cache, no shards, no megatron-core.

Shapes: S tokens, H query heads, G key heads, R = H / G, D channels of a head.
"""

import dataclasses

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainGptShape:
    """Properties of the model that its weights do not show."""

    layers: int
    heads: int
    key_heads: int
    channels: int
    vocab_size: int
    eps: float
    rotary_base: float | None
    """None: learned positions."""
    rotary_channels: int
    window: int | None
    swiglu: bool
    rms: bool
    head_norms: bool
    """Queries and keys of each head are normalised."""


class PlainGpt:
    """Logits of every position from one pass over the whole sequence."""

    def __init__(self, weights: dict[str, torch.Tensor], shape: PlainGptShape) -> None:
        self._weights = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        self._shape = shape

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits, fp32 [S, vocabulary]."""
        embedding = self._weights["embedding.word_embeddings.weight"]
        x = embedding[torch.tensor(tokens)]
        if self._shape.rotary_base is None:
            x = x + self._weights["embedding.position_embeddings.weight"][: len(tokens)]
        for layer in range(self._shape.layers):
            prefix = f"decoder.layers.{layer}."
            x = x + self._attention(self._norm(x, prefix + "input_layernorm"), prefix + "self_attention.")
            x = x + self._mlp(self._norm(x, prefix + "pre_mlp_layernorm"), prefix + "mlp.")
        output = self._weights.get("output_layer.weight", embedding)
        return (self._norm(x, "decoder.final_layernorm") @ output.T)[:, : self._shape.vocab_size].float()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[name + ".weight"]
        if self._shape.rms:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._shape.eps) * weight
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + self._shape.eps)
        return scaled * weight + self._weights[name + ".bias"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._weights[name + ".weight"], self._weights.get(name + ".bias"))

    def _attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        shape, length = self._shape, len(x)
        repeats = shape.heads // shape.key_heads
        qkv = self._linear(x, prefix + "linear_qkv").view(length, shape.key_heads, repeats + 2, shape.channels)
        query = qkv[:, :, :repeats].reshape(length, shape.heads, shape.channels)
        query, key = self._head_norms(query, qkv[:, :, repeats], prefix)
        key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, qkv[:, :, repeats + 1]))
        if shape.rotary_base is not None:
            query, key = self._rotate(query), self._rotate(key)
        scores = torch.einsum("qhd,khd->hqk", query, key) / shape.channels**0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance > (length if shape.window is None else shape.window))
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        context = torch.einsum("hqk,khd->qhd", probabilities, value).reshape(length, -1)
        return self._linear(context, prefix + "linear_proj")

    def _head_norms(self, query: torch.Tensor, key: torch.Tensor, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise the channels of each head, in models that do."""
        if not self._shape.head_norms:
            return query, key
        return self._norm(query, f"{prefix}q_layernorm"), self._norm(key, f"{prefix}k_layernorm")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Each channel of the first half turns with its fellow of the second half, as one complex number."""
        assert self._shape.rotary_base is not None
        half = self._shape.rotary_channels // 2
        speed = self._shape.rotary_base ** (-torch.arange(half) / half)
        angle = torch.arange(len(x))[:, None, None] * speed
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)

    def _mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        inner = self._linear(x, prefix + "linear_fc1")
        if self._shape.swiglu:
            gate, up = inner.chunk(2, dim=-1)
            return self._linear(functional.silu(gate) * up, prefix + "linear_fc2")
        return self._linear(functional.gelu(inner), prefix + "linear_fc2")
