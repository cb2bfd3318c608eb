"""Reader and writer of the tensors of our checkpoints without a process group, one at a time.

The format is the one that `checkpoint.storage` writes through megatron-core: torch's distributed checkpoint, in which
all layers of one kind are one tensor with an axis of layers in front, saved in chunks of one layer. It is independent
of ranks, so every layout reads its own part of it.
"""

import io
import json
import pathlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from megatronapp_trainer.checkpoint.checksums import WrittenFile
from megatronapp_trainer.checkpoint.directory import BrokenCheckpointError
from megatronapp_trainer.checkpoint.pickles import read_plain
from megatronapp_trainer.checkpoint.saving.rank_content import OPTIMIZER_PREFIX
from megatronapp_trainer.checkpoint.writer import CORE_FORMAT, ChecksummingWriter

_SHARED_EXPERTS = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
_STATEFUL = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer for which megatron-core requires an extra state, the third with Transformer Engine alone. They
have none, and None is what megatron-core's own layers write.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyTensor:
    """A tensor to write, or one layer of it."""

    key: str
    size: tuple[int, ...]
    """Size without the axis of layers."""
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    layer: int | None = None

    def item(self, layers: int) -> WriteItem:
        """Return the position in the checkpoint."""
        front, whole, offset = ((), (), ()) if self.layer is None else ((1,), (layers,), (self.layer,))
        offsets = torch.Size((*offset, *(0 for _ in self.size)))
        return WriteItem(
            index=MetadataIndex(self.key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((*front, *self.size))),
                properties=TensorProperties(dtype=self.dtype),
                size=torch.Size((*whole, *self.size)),
            ),
        )


class _LazyPlanner(SavePlanner):
    """Reads every tensor at the moment when it is written."""

    def __init__(self, tensors: Sequence[LazyTensor], layers: int) -> None:
        self._layers = layers
        self._items = {tensor.item(layers).index: tensor.item(layers) for tensor in tensors}
        self._tensors = {tensor.item(layers).index: tensor for tensor in tensors}
        has_shared = any(tensor.key.startswith(f"decoder.layers.{_SHARED_EXPERTS[0]}") for tensor in tensors)
        self._stateful = (*_STATEFUL, *_SHARED_EXPERTS) if has_shared else _STATEFUL

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ANN401
        pass

    def create_local_plan(self) -> SavePlan:
        states = [
            WriteItem(
                index=MetadataIndex(f"decoder.layers.{module}._extra_state/shard_{layer}_{self._layers}"),
                type=WriteItemType.BYTE_IO,
            )
            for layer in range(self._layers)
            for module in self._stateful
        ]
        return SavePlan([*states, *self._items.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return _saved([None])
        assert write_item.tensor_data is not None
        return self._tensors[write_item.index].read().reshape(write_item.tensor_data.chunk.sizes)


def _saved(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def write(tensors: Sequence[LazyTensor], layers: int, folder: pathlib.Path) -> dict[str, WrittenFile]:
    """Write all tensors of a model into an empty folder, without its manifest; returns sizes and checksums of the
    files.

    Raises:
        OSError: the folder could not be written.
        Exception: any error of reading a tensor.
    """
    writer = ChecksummingWriter(folder, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process.*", category=UserWarning)
        try:
            save({}, storage_writer=writer, planner=_LazyPlanner(tensors, layers), no_dist=True)
        except CheckpointException as error:
            raise first_cause(error) from error
    torch.save({"iteration": 0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(CORE_FORMAT), encoding="utf-8")
    return writer.written()


def first_cause(error: CheckpointException) -> BaseException:
    """Return the first cause; a plain RuntimeError of torch's archive writer hides the system's reason, as of a full
    disk.
    """
    _, (cause, _) = min(error.failures.items())
    return OSError(f"a file could not be written to its end ({cause})") if type(cause) is RuntimeError else cause


class StoredTensors:
    """Tensors in the folder of a checkpoint."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._reader = FileSystemReader(folder)
        try:
            found = read_plain((folder / ".metadata").read_bytes())
        except Exception as error:  # a damaged pickle raises anything
            raise BrokenCheckpointError(f"its .metadata cannot be read ({error})") from error
        if not isinstance(found, Metadata):
            raise BrokenCheckpointError("its .metadata is not of torch's distributed checkpoints")
        self._metadata = found
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def names(self) -> list[str]:
        """Return the names of all tensors and objects."""
        return list(self._metadata.state_dict_metadata)

    def find(self, key: str) -> TensorStorageMetadata | None:
        """Return size, type and chunks of a tensor, or None if it does not exist."""
        found = self._metadata.state_dict_metadata.get(key)
        return found if isinstance(found, TensorStorageMetadata) else None

    def places_of_weights(self) -> dict[str, list[tuple[int, int]]]:
        """Return the byte ranges of each data file that hold no optimizer state, sorted and merged."""
        found: dict[str, list[tuple[int, int]]] = {}
        stored = [(place, index.fqn) for index, place in self._metadata.storage_data.items()]
        for place, name in sorted(stored, key=lambda entry: (entry[0].relative_path, entry[0].offset)):
            if name.startswith(OPTIMIZER_PREFIX):
                continue
            ranges = found.setdefault(place.relative_path, [])
            start = ranges.pop()[0] if ranges and ranges[-1][1] == place.offset else place.offset
            ranges.append((start, place.offset + place.length))
        return found

    def read(self, key: str, layer: int | None = None) -> torch.Tensor:
        """Read a tensor, or one layer of it without the axis of layers.

        Raises BrokenCheckpointError.
        """
        stored = self.find(key)
        assert stored is not None, "find() says what there is"
        offsets = [0] * len(stored.size)
        sizes = list(stored.size)
        if layer is not None:
            offsets[0], sizes[0] = layer, 1
        target = torch.empty(sizes, dtype=stored.properties.dtype)
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        plan = LoadPlan(create_read_items_for_chunk_list(key, stored, [chunk]))
        try:
            self._reader.read_data(plan, _TensorTarget(target)).wait()
        except Exception as error:  # a damaged archive raises anything
            raise BrokenCheckpointError(f"{key} cannot be read ({error})") from error
        return target if layer is None else target.squeeze(0)


class _TensorTarget(LoadPlanner):
    """Copies what is read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: ANN401
        pass

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are requested")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._target
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
