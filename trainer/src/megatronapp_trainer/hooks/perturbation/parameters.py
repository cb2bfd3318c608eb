"""Parameters of storage perturbations: where they are on a rank, and their elements' places in the whole tensor."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from megatronapp_common.scope.perturbation.recipe import Perturbation
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard, gated_index

QKV, PROJECTION, FC1, FC2 = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
EMBEDDING, OUTPUT = "embedding.word_embeddings", "output_layer"
OUTSIDE_LAYERS = (EMBEDDING, "embedding.position_embeddings", "decoder.final_layernorm", OUTPUT)
"""Modules with parameters that belong to no layer."""
_COLUMN_PARALLEL = frozenset({QKV, FC1, EMBEDDING, OUTPUT})
_ROW_PARALLEL = frozenset({PROJECTION, FC2})
_VOCABULARY = frozenset({EMBEDDING, OUTPUT})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """A rank's shard of a parameter that a perturbation selects."""

    name: str
    """Canonical name in the whole model, such as `decoder.layers.3.mlp.linear_fc1.weight`."""
    parameter: torch.nn.Parameter
    module: str
    """Module that holds it, below its layer or the model."""


def local_parameters(perturbation: Perturbation, model: Any, shard: ModelShard) -> Iterator[LocalParameter]:  # noqa: ANN401 - GPTModel
    """Yield the parameters of this rank that a storage perturbation selects."""
    module, tensor = perturbation.parameter or "", perturbation.tensor
    if module in OUTSIDE_LAYERS:
        path = _path_outside_layers(module, model, shard)
        if path is not None and (found := _tensor_of(model, path, tensor)) is not None:
            yield LocalParameter(name=f"{module}.{tensor}", parameter=found, module=module)
        return
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        if perturbation.layers is not None and number not in perturbation.layers:
            continue
        if (found := _tensor_of(layer, module, tensor)) is not None:
            yield LocalParameter(name=f"decoder.layers.{number}.{module}.{tensor}", parameter=found, module=module)


def _path_outside_layers(module: str, model: Any, shard: ModelShard) -> str | None:  # noqa: ANN401 - GPTModel
    """Return the path of the module on this rank: the last stage holds a copy of tied word embeddings as its output."""
    if module == EMBEDDING and shard.tied and not hasattr(model, "embedding"):
        return OUTPUT
    return module


def _tensor_of(root: torch.nn.Module, path: str, tensor: str) -> torch.nn.Parameter | None:
    try:
        found = getattr(root.get_submodule(path), tensor, None)
    except AttributeError:
        return None
    return found if isinstance(found, torch.nn.Parameter) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElementIndex:
    """Places of a shard's elements in the whole tensor [rows, columns]; a vector has one column."""

    rows: torch.Tensor
    """Global row of each local row, int64."""
    columns: torch.Tensor
    width: int
    """Columns of the whole tensor."""
    chosen_rows: torch.Tensor
    """True for rows that the perturbation selects and that are no padding."""
    chosen_columns: torch.Tensor

    def indices(self, rows: slice) -> torch.Tensor:
        """Return the global indices of the elements of some local rows, int64 [rows, columns]."""
        return self.rows[rows, None] * self.width + self.columns

    def flat(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return global indices, and which are selected, of elements by their places in the shard, row after row."""
        places = torch.arange(first, end, device=self.rows.device)
        rows = torch.div(places, self.columns.numel(), rounding_mode="floor")
        columns = places % self.columns.numel()
        indices = self.rows[rows] * self.width + self.columns[columns]
        return indices, self.chosen_rows[rows] & self.chosen_columns[columns]

    def chosen(self, rows: slice) -> torch.Tensor:
        """Return which elements of some local rows are selected, bool [rows, columns]."""
        return self.chosen_rows[rows, None] & self.chosen_columns


def element_index(local: LocalParameter, perturbation: Perturbation, shard: ModelShard) -> ElementIndex:
    """Return where the elements of a shard are in the whole tensor, and which of them are selected."""
    module, data = local.module, local.parameter.data
    count, width = data.size(0), data.size(1) if data.ndim > 1 else 1
    local_rows, columns = (torch.arange(size, device=data.device) for size in (count, width))
    rows = local_rows
    if module == FC1 and shard.gated:
        rows = gated_index(local_rows, count, shard)
    elif module in _COLUMN_PARALLEL:
        rows = local_rows + shard.tensor_rank * count
    is_row_parallel = module in _ROW_PARALLEL and data.ndim > 1
    if is_row_parallel:
        columns = columns + shard.tensor_rank * width
    return ElementIndex(
        rows=rows,
        columns=columns,
        width=width * (shard.tensor_size if is_row_parallel else 1),
        chosen_rows=_chosen_rows(module, rows, perturbation, shard),
        chosen_columns=_chosen_columns(module, columns, perturbation, shard),
    )


def _chosen_rows(module: str, rows: torch.Tensor, perturbation: Perturbation, shard: ModelShard) -> torch.Tensor:
    chosen = torch.ones_like(rows, dtype=torch.bool)
    if module in _VOCABULARY:
        return rows < shard.vocabulary
    if module == QKV and (perturbation.part is not None or perturbation.heads is not None):
        return _chosen_heads(rows, perturbation, shard)
    if module == FC1 and perturbation.part is not None:
        return rows < shard.ffn if perturbation.part == "gate" else rows >= shard.ffn
    return chosen


def _chosen_heads(rows: torch.Tensor, perturbation: Perturbation, shard: ModelShard) -> torch.Tensor:
    """Select rows of queries, keys or values: the whole tensor has, for each group, its query heads, a key, a value."""
    repeats = shard.heads // shard.key_heads
    head_rows = torch.div(rows, shard.head_width, rounding_mode="floor")
    group, place = torch.div(head_rows, repeats + 2, rounding_mode="floor"), head_rows % (repeats + 2)
    is_query, is_key = place < repeats, place == repeats
    chosen = {"query": is_query, "key": is_key, "value": place == repeats + 1}[perturbation.part or "query"]
    if perturbation.heads is None:
        return chosen
    heads = torch.where(is_query, group * repeats + place, group)
    return chosen & torch.isin(heads, torch.tensor(perturbation.heads, device=rows.device))


def _chosen_columns(module: str, columns: torch.Tensor, perturbation: Perturbation, shard: ModelShard) -> torch.Tensor:
    if module != PROJECTION or perturbation.heads is None:
        return torch.ones_like(columns, dtype=torch.bool)
    heads = torch.div(columns, shard.head_width, rounding_mode="floor")
    return torch.isin(heads, torch.tensor(perturbation.heads, device=columns.device))
