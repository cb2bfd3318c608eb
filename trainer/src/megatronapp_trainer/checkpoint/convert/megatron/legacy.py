"""Weights in Megatron-LM's legacy layout: a file for each tensor and pipeline rank, joined to whole tensors.

The names are those of a GPTModel of megatron-core, with or without Transformer Engine, or of the model that Megatron-LM
had before megatron-core (`language_model.encoder.layers.0.self_attention.query_key_value.weight`).
"""

import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatronapp_trainer.checkpoint.convert.megatron.weights import EMBEDDING, HEAD, LAYERS, Place
from megatronapp_trainer.checkpoint.directory import BrokenCheckpointError
from megatronapp_trainer.checkpoint.foreign import rank_files
from megatronapp_trainer.checkpoint.pickles import read_torch
from megatronapp_trainer.errors import CheckpointError

_LAYER = re.compile(r"(?:decoder|(?:language_model\.)?(?:encoder|transformer))\.layers\.(\d+)\.(.+)")
_OF_LAYERS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("input_norm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("post_attention_norm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.query_key_value.", "self_attention.linear_qkv."),
    ("attention.query_key_value.", "self_attention.linear_qkv."),
    ("self_attention.dense.", "self_attention.linear_proj."),
    ("attention.dense.", "self_attention.linear_proj."),
    ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
)
_OF_MODEL = re.compile(
    r"(?:language_model\.)?(?:(embedding\.\w+\.weight|output_layer\.weight)"
    r"|(?:decoder|encoder|transformer)\.final_(?:layer)?norm\.(weight|bias))"
)
_NO_WEIGHTS = re.compile(r".*_extra_state|.*inv_freq|.*masked_bias|.*attention\.bias|word_embeddings_for_head\..*")
_ROWS = (EMBEDDING, HEAD, "self_attention.linear_qkv.", "mlp.linear_fc1.")
_COLUMNS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
_GROUPED = 2.0
"""First checkpoint_version in which query, key and value of each head are stored together."""


class LegacyWeights:
    """Weights of one checkpoint. Files are mapped; a tensor is joined when it is read."""

    def __init__(self, folder: pathlib.Path) -> None:
        files = rank_files(folder)
        if any(expert for _, _, expert in files):
            raise CheckpointError(
                f"{folder} has files of expert ranks: mixtures of experts are converted from Hugging Face folders alone"
            )
        loaded = {(stage, tensor): _load(file) for (stage, tensor, _), file in sorted(files.items())}
        first = next(iter(loaded.values()))
        self._version = float(first.get("checkpoint_version") or 0)
        self.iteration = int(first.get("iteration") or 0)
        self.arguments: Mapping[str, Any] = vars(first["args"]) if "args" in first else {}
        if not self.arguments:
            raise CheckpointError(
                f"{folder} holds no arguments, as of Megatron-LM before 2.0, so that its heads are not known; take the "
                "same model from Hugging Face, for the 345M of NGC gpt2-medium"
            )
        self._parts = _parts(folder, loaded)

    def places(self) -> set[Place]:
        """Return the places of all weights."""
        tied = not self.arguments.get("untie_embeddings_and_output_weights")
        return {place for place in self._parts if not (tied and place[0] == HEAD)}

    def size(self, place: Place) -> tuple[int, ...]:
        """Return the size of one layer's tensor."""
        parts, axis = self._parts[place], _axis(place[0])
        size = list(parts[0].shape)
        if axis is not None:
            size[axis] = sum(part.shape[axis] for part in parts)
        return tuple(size)

    def dtype(self, place: Place) -> torch.dtype:
        """Return the type of a tensor's numbers."""
        return self._parts[place][0].dtype

    def read(self, place: Place) -> torch.Tensor:
        """Read a whole tensor from its parts."""
        name, parts = place[0], self._parts[place]
        axis = _axis(name)
        if axis is None:
            return parts[0]
        if "linear_qkv." in name and self._version < _GROUPED:
            parts = [self._grouped(part) for part in parts]
        if "linear_fc1." in name and self.arguments.get("swiglu"):
            halves = [part.chunk(2) for part in parts]
            return torch.cat([half[side] for side in (0, 1) for half in halves])
        return torch.cat(parts, axis)

    def _grouped(self, part: torch.Tensor) -> torch.Tensor:
        """Reorder [3, heads, width, ...] of version 0, or [heads, width, 3, ...] of version 1, to [heads, 3, width,
        ...].
        """
        width = self.arguments.get("kv_channels") or (
            self.arguments["hidden_size"] // self.arguments["num_attention_heads"]
        )
        rest = part.shape[1:]
        if self._version < 1:
            return part.reshape(3, -1, width, *rest).transpose(0, 1).reshape(part.shape)
        return part.reshape(-1, width, 3, *rest).transpose(1, 2).reshape(part.shape)


def _load(path: pathlib.Path) -> dict[str, Any]:
    try:
        loaded = read_torch(path)
    except Exception as error:  # a damaged archive raises anything
        raise BrokenCheckpointError(f"its {path.parent.name}/{path.name} cannot be read ({error})") from error
    if not isinstance(loaded, dict):
        raise BrokenCheckpointError(f"its {path.parent.name}/{path.name} is not a checkpoint of Megatron-LM")
    return loaded


def _parts(folder: pathlib.Path, loaded: Mapping[tuple[int, int], dict[str, Any]]) -> dict[Place, list[torch.Tensor]]:
    """Return the parts of every tensor in the order of tensor ranks."""
    stages = sorted({stage for stage, _ in loaded})
    tensors = sorted({tensor for _, tensor in loaded})
    if stages != list(range(len(stages))) or set(loaded) != {(p, t) for p in stages for t in range(len(tensors))}:
        raise BrokenCheckpointError(f"{folder} lacks files of some ranks; is the copy complete?")
    parts: dict[Place, list[torch.Tensor]] = {}
    for tensor in tensors:
        first = 0
        for chunk in _chunks(loaded[0, tensor]):
            for stage in stages:
                flat = dict(_flat(loaded[stage, tensor].get(chunk, {}), ""))
                for name, value in flat.items():
                    place = _place(name, first)
                    if place is not None and len(parts.setdefault(place, [])) <= tensor:
                        parts[place].append(value)
                first += len({match[1] for name in flat if (match := _LAYER.fullmatch(name))})
    return parts


def _chunks(rank: Mapping[str, Any]) -> list[str]:
    """Return the keys of the model, or of the chunks of an interleaved schedule."""
    if "model" in rank:
        return ["model"]
    return sorted((key for key in rank if re.fullmatch(r"model\d+", key)), key=lambda key: int(key[5:]))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dictionaries with their full names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value


def _place(name: str, first: int) -> Place | None:
    """Return the place of a tensor of a rank whose first layer is `first`; None if it is not a weight."""
    if _NO_WEIGHTS.fullmatch(name):
        return None
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        theirs, ours = next((pair for pair in _OF_LAYERS if layer[2].startswith(pair[0])), ("", ""))
        return f"{LAYERS}{ours}{layer[2].removeprefix(theirs)}", first + int(layer[1])
    model = _OF_MODEL.fullmatch(name)
    if model is None:
        return name, None
    return model[1] or f"decoder.final_layernorm.{model[2]}", None


def _axis(name: str) -> int | None:
    """Return the axis along which tensor ranks have parts; None if each has the whole tensor."""
    suffix = name.removeprefix(LAYERS)
    if suffix in _COLUMNS:
        return 1
    return 0 if suffix.startswith(_ROWS) and "layer_norm" not in suffix else None
