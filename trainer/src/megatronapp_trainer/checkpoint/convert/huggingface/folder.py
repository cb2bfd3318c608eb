"""Tensors of a Hugging Face folder, one at a time: model.safetensors, or shards with an index."""

import json
import math
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatronapp_trainer.checkpoint.directory import MANIFEST
from megatronapp_trainer.errors import CheckpointError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PICKLES = re.compile(r"pytorch_model.*\.bin|model.*\.pt|consolidated.*\.pth")


def is_hf_folder(path: pathlib.Path) -> bool:
    """Return True for a folder as `save_pretrained` of transformers writes it."""
    return (path / CONFIG).is_file() and not (path / MANIFEST).exists() and not any(path.glob("iter_*"))


class TensorFolder:
    """Tensors of a folder. Files are mapped, so that a tensor takes memory only while it is used."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._files = {name: self._open(name) for name in self._file_names()}
        self._owner = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118 - no mapping

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._owner)

    def size(self, name: str) -> tuple[int, ...]:
        """Return the size of a tensor, from the file's header."""
        return tuple(self._owner[name].get_slice(name).get_shape())

    def count(self, name: str) -> int:
        """Return the number of elements of a tensor."""
        return math.prod(self.size(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor's numbers, from the file's header.

        Raises CheckpointError for quantised weights.
        """
        kind = self._owner[name].get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise CheckpointError(
                f"{self.path}: {name} holds {kind}; supported are {', '.join(_FLOATS)}, not quantised"
            )
        return _FLOATS[kind]

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._owner[name].get_tensor(name)
        return tensor

    def _file_names(self) -> list[str]:
        if (self.path / _WHOLE).is_file():
            return [_WHOLE]
        if (self.path / INDEX).is_file():
            return sorted(_indexed(self.path / INDEX))
        names = sorted(entry.name for entry in self.path.iterdir())
        if any(_PICKLES.fullmatch(name) for name in names):
            raise CheckpointError(
                f"{self.path} has pickled weights only, which could run code when they are read; write it again with "
                "save_pretrained of transformers, which makes model.safetensors"
            )
        raise CheckpointError(f"{self.path} has neither {_WHOLE} nor {INDEX}; is the download complete?")

    def _open(self, name: str) -> Any:  # noqa: ANN401 - safetensors carries no types
        try:
            return safe_open(str(self.path / name), framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read ({error}); is the download complete?") from error


def _indexed(index: pathlib.Path) -> set[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read as an index of shards ({error})") from error
    return set(names)


class TensorWriter:
    """Writes a folder's tensors in shards of at most `shard_bytes`; one shard is in memory."""

    def __init__(self, path: pathlib.Path, shard_bytes: int) -> None:
        self._path = path
        self._limit = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write all tensors to the folder."""
        for name, tensor in tensors:
            if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
                self._flush()
            # a copy: safetensors refuses views, which would also keep all of their base tensor in memory
            self._pending[name] = tensor.clone(memory_format=torch.contiguous_format)
            self._pending_bytes += tensor.nbytes
            self._total_bytes += tensor.nbytes
        self._flush()
        self._name_shards()

    def _flush(self) -> None:
        path = self._path / f"shard-{len(self._shards)}"
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path} could not be written to its end ({error})") from error
        path.chmod(
            self._path.stat().st_mode & 0o666
        )  # safetensors permits only the owner to read, the folder may permit more
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            (self._path / "shard-0").rename(self._path / _WHOLE)
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            final = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self._path / f"shard-{index}").rename(self._path / final)
            places |= dict.fromkeys(names, final)
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": places}
        (self._path / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
