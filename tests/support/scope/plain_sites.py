"""All numbers of a forward pass, written down with torch alone: the reference for what ranks capture."""

from typing import Any

import torch
from plain_gpt import PlainGpt
from torch.nn import functional


class SeenGpt(PlainGpt):
    """Model that records every site of docs/scope-protocol.md, section 2."""

    @torch.no_grad()
    def sites(self, tokens: list[int]) -> dict[str, Any]:
        """Arrays by site: [rows, layers, ..], [rows, ..] without layers, `attention` [layers, heads, rows, rows]."""
        shape, embedding = self._shape, self._weights["embedding.word_embeddings.weight"]
        x = embedding[torch.tensor(tokens)]
        if shape.rotary_base is None:
            x = x + self._weights["embedding.position_embeddings.weight"][: len(tokens)]
        found: dict[str, list[torch.Tensor]] = {}
        whole = {"embedding": x}
        for layer in range(shape.layers):
            x = self._seen_layer(x, f"decoder.layers.{layer}.", found)
        whole["final_norm"] = self._norm(x, "decoder.final_layernorm")
        output = self._weights.get("output_layer.weight", embedding)
        whole["logits"] = (whole["final_norm"] @ output.T)[:, : shape.vocab_size]
        stacked = {name: torch.stack(tensors, dim=0 if name == "attention" else 1) for name, tensors in found.items()}
        return {name: value.numpy() for name, value in (whole | stacked).items()}

    def _seen_layer(self, x: torch.Tensor, prefix: str, found: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        queries = self._seen_attention(self._norm(x, prefix + "input_layernorm"), prefix + "self_attention.", found)
        x = x + queries
        mlp_in = self._norm(x, prefix + "pre_mlp_layernorm")
        mlp1 = self._linear(mlp_in, prefix + "mlp.linear_fc1")
        gate, up = mlp1.chunk(2, dim=-1)
        inner = functional.silu(gate) * up if self._shape.swiglu else functional.gelu(mlp1)
        mlp2 = self._linear(inner, prefix + "mlp.linear_fc2")
        x = x + mlp2
        sites = {"attention_output": queries, "mlp_in": mlp_in, "mlp1": mlp1, "mlp2": mlp2, "residual": x}
        for name, value in sites.items():
            found.setdefault(name, []).append(value)
        return x

    def _seen_attention(self, x: torch.Tensor, prefix: str, found: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        shape, rows = self._shape, len(x)
        repeats = shape.heads // shape.key_heads
        qkv = self._linear(x, prefix + "linear_qkv").view(rows, shape.key_heads, repeats + 2, shape.channels)
        query = qkv[:, :, :repeats].reshape(rows, shape.heads, shape.channels)
        query, key = self._head_norms(query, qkv[:, :, repeats], prefix)
        value = qkv[:, :, repeats + 1]
        before = {"q before": query, "k before": key}
        if shape.rotary_base is not None:
            query, key = self._rotate(query), self._rotate(key)
        keys, values = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, keys) / shape.channels**0.5
        distance = torch.arange(rows)[:, None] - torch.arange(rows)
        hidden = (distance < 0) | (distance > (rows if shape.window is None else shape.window))
        attention = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        context = torch.einsum("hqk,khd->qhd", attention, values).reshape(rows, -1)
        heads = {"q": query, "k": key, "v": value, "head_output": context.view(rows, shape.heads, -1)}
        for name, tensor in (before | heads | {"attention": attention}).items():
            found.setdefault(name, []).append(tensor)
        return self._linear(context, prefix + "linear_proj")


class PatchedGpt(SeenGpt):
    """Model whose linear modules get some inputs, or give some outputs, of another text."""

    def patch_output(self, module: str, rows: slice, values: torch.Tensor) -> None:
        """Put values in as rows of what a module gives."""
        self._output_edits = {**getattr(self, "_output_edits", {}), module: (rows, values)}

    def patch_input(self, module: str, rows: slice, columns: slice, values: torch.Tensor) -> None:
        """Put values in as rows and columns of what a module is given."""
        self._input_edits = {**getattr(self, "_input_edits", {}), module: (rows, columns, values)}

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name in getattr(self, "_input_edits", {}):
            rows, columns, values = self._input_edits[name]
            x = x.clone()
            x[rows, columns] = values
        output = super()._linear(x, name)
        if name in getattr(self, "_output_edits", {}):
            rows, values = self._output_edits[name]
            output[rows] = values
        return output
