"""Weights in megatron-core's torch_dist, by Megatron-LM or by this trainer, independent of the layout that wrote them.

Layers are one tensor with an axis of layers in front, or separate tensors (`decoder.layers.3.`); a gated MLP is one
tensor, or two that end in `_w` and `_v` (megatron-core 0.14 and newer write either).
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import torch

from megatronapp_trainer.checkpoint.convert.megatron.weights import LAYERS, Place
from megatronapp_trainer.checkpoint.directory import BrokenCheckpointError
from megatronapp_trainer.checkpoint.foreign import COMMON
from megatronapp_trainer.checkpoint.pickles import read_torch
from megatronapp_trainer.checkpoint.tensor_files import StoredTensors

_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OTHER = re.compile(r"(chained_\d+\.)?optimizer\..*|.*_extra_state.*|rng_state.*|rerun_state.*|dataloader.*")
"""Names of stored objects that are no weights."""
_HALVES = ("_w", "_v")


class CoreWeights:
    """Weights of one torch_dist checkpoint."""

    def __init__(self, folder: pathlib.Path, arguments: Mapping[str, Any], iteration: int) -> None:
        self.arguments = arguments
        self.iteration = iteration
        self._stored = StoredTensors(folder)
        self._keys: dict[Place, tuple[list[str], int | None]] = {}
        for key in self._stored.names():
            if _OTHER.fullmatch(key) is None:
                self._add(key)

    def _add(self, key: str) -> None:
        found = self._stored.find(key)
        numbered = _NUMBERED.fullmatch(key)
        name = key if numbered is None else f"{LAYERS}{numbered[2]}"
        half = name.endswith(_HALVES)
        name = name[:-2] if half else name
        if numbered is not None:
            places: list[tuple[int | None, int | None]] = [(int(numbered[1]), None)]
        elif key.startswith(LAYERS) and found is not None:
            places = [(layer, layer) for layer in range(found.size[0])]
        else:
            places = [(None, None)]
        for layer, row in places:
            keys, _ = self._keys.setdefault((name, layer), ([], row))
            keys.append(key)
            keys.sort(key=lambda key: key.endswith(_HALVES[1]))

    def places(self) -> set[Place]:
        """Return the places of all weights."""
        return set(self._keys)

    def size(self, place: Place) -> tuple[int, ...]:
        """Return the size of one layer's tensor."""
        keys, row = self._keys[place]
        sizes = [self._found(key).size[0 if row is None else 1 :] for key in keys]
        return (sum(size[0] for size in sizes), *sizes[0][1:])

    def dtype(self, place: Place) -> torch.dtype:
        """Return the type of a tensor's numbers."""
        keys, _ = self._keys[place]
        dtype: torch.dtype = self._found(keys[0]).properties.dtype
        return dtype

    def read(self, place: Place) -> torch.Tensor:
        """Read a whole tensor.

        Raises BrokenCheckpointError.
        """
        keys, row = self._keys[place]
        parts = [self._stored.read(key, row) for key in keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _found(self, key: str) -> Any:  # noqa: ANN401 - TensorStorageMetadata
        found = self._stored.find(key)
        if found is None:
            raise BrokenCheckpointError(f"{key} is not a tensor")
        return found


def open_torch_dist(folder: pathlib.Path) -> CoreWeights:
    """Open a checkpoint of Megatron-LM.

    Raises BrokenCheckpointError.
    """
    try:
        common = read_torch(folder / COMMON)
        arguments = vars(common["args"])
        return CoreWeights(folder, arguments, int(common.get("iteration") or 0))
    except BrokenCheckpointError:
        raise
    except Exception as error:  # a damaged archive raises anything
        raise BrokenCheckpointError(f"its {COMMON} cannot be read ({error})") from error
