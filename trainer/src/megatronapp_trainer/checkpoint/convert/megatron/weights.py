"""The tensors of a GPT model as this trainer stores them, and their sources."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from megatronapp_trainer.config import ModelConfig

LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
Place = tuple[str, int | None]
"""Name of a tensor, and its layer where every layer has one."""


class CheckpointWeights(Protocol):
    """An opened checkpoint. Names are those of megatron-core's torch_dist, with the layer separate."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Return the arguments of the training that wrote it."""
        ...

    @property
    def iteration(self) -> int:
        """Return the iteration of that training."""
        ...

    def places(self) -> set[Place]:
        """Return the places of all weights."""
        ...

    def size(self, place: Place) -> tuple[int, ...]:
        """Return the size of one layer's tensor."""
        ...

    def dtype(self, place: Place) -> torch.dtype:
        """Return the type of a tensor's numbers."""
        ...

    def read(self, place: Place) -> torch.Tensor:
        """Read a whole tensor.

        Raises BrokenCheckpointError.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a model has."""

    place: Place
    size: tuple[int, ...]


def expected(model: ModelConfig, rows: int) -> Iterator[ExpectedTensor]:
    """Yield all tensors of a model whose embedding has `rows`."""
    hidden = model.hidden_size
    yield ExpectedTensor((EMBEDDING, None), (rows, hidden))
    if model.position_embedding_type == "learned_absolute":
        yield ExpectedTensor(("embedding.position_embeddings.weight", None), (model.positions, hidden))
    for layer in range(model.num_layers):
        for name, size in _layer(model).items():
            yield ExpectedTensor((f"{LAYERS}{name}", layer), size)
    for name, size in _norm("decoder.final_layernorm.", model, hidden).items():
        yield ExpectedTensor((name, None), size)
    if model.untie_embeddings_and_output_weights:
        yield ExpectedTensor((HEAD, None), (rows, hidden))


def _layer(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, bias = model.hidden_size, model.add_bias_linear
    queries, keys = model.num_attention_heads * model.head_width, model.heads_of_keys * model.head_width
    inner = model.mlp_width * (2 if model.swiglu else 1)
    tensors = {
        **_norm("self_attention.linear_qkv.layer_norm_", model, hidden),
        **(_head_norms(model) if model.qk_layernorm else {}),
        "self_attention.linear_qkv.weight": (queries + 2 * keys, hidden),
        "self_attention.linear_qkv.bias": (queries + 2 * keys,) if bias or model.add_qkv_bias else None,
        "self_attention.linear_proj.weight": (hidden, queries),
        "self_attention.linear_proj.bias": (hidden,) if bias else None,
        **_norm("mlp.linear_fc1.layer_norm_", model, hidden),
        "mlp.linear_fc1.weight": (inner, hidden),
        "mlp.linear_fc1.bias": (inner,) if bias else None,
        "mlp.linear_fc2.weight": (hidden, model.mlp_width),
        "mlp.linear_fc2.bias": (hidden,) if bias else None,
    }
    return {name: size for name, size in tensors.items() if size is not None}


def _head_norms(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    queries, keys = (_norm(f"self_attention.{part}_layernorm.", model, model.head_width) for part in ("q", "k"))
    return queries | keys


def _norm(prefix: str, model: ModelConfig, width: int) -> dict[str, tuple[int, ...]]:
    names = ("weight",) if model.normalization == "RMSNorm" else ("weight", "bias")
    return {f"{prefix}{name}": (width,) for name in names}


def name_of(place: Place) -> str:
    """Return the full name, for messages."""
    name, layer = place
    return name if layer is None else name.replace(LAYERS, f"{LAYERS}{layer}.", 1)
