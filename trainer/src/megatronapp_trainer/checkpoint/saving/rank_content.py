"""Content that a rank writes of a checkpoint: tensors, small objects, and the part that all ranks share."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of an optimizer's tensors."""
Signature = tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]
"""Name, offset, shape and type of every tensor of a rank. Ranks plan again where it has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContent:
    """Content of a rank's data file, in the order of its items, and of the shared file."""

    items: list[WriteItem]
    """Places of the tensors, then of the objects."""
    tensors: list[torch.Tensor]
    """The live tensors, which only the next update of training changes."""
    objects: list[bytes]
    common: bytes
    """Content of the file that rank 0 writes for all."""


class ReplicaDivision:
    """Division of replicated tensors over the data-parallel ranks: each is written by one of them.

    megatron-core's own division, by which the ranks write about the same number of bytes. It needs one exchange of
    names, and holds for all further checkpoints of a run.
    """

    def __init__(self) -> None:
        self._division: Any = None

    def divide(self, sharded: dict[str, Any]) -> None:
        """Compute the division; collective over the data-parallel ranks."""
        from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution

        self._division = determine_main_replica_uniform_distribution(sharded, _replicas())

    def apply(self, sharded: dict[str, Any]) -> None:
        """Mark the tensors that this rank writes."""
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            distribute_main_replicas_with_precomputed_distribution,
        )

        distribute_main_replicas_with_precomputed_distribution(sharded, _replicas(), self._division)
        _leave_out_copies(sharded)


def _replicas() -> Any:  # noqa: ANN401 - ProcessGroup
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _leave_out_copies(sharded: dict[str, Any]) -> None:
    """Let this rank write a tensor once of which it has two equal copies: in a vee, those of a tied embedding.

    megatron-core's division knows a tensor by its name and place, and marks both.
    """
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    written = set()
    for entry in _entries(sharded):
        place = (entry.key, tuple(entry.global_offset))
        if place in written:
            entry.replica_id = 1
        elif is_main_replica(entry.replica_id):
            written.add(place)


def split(content: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the sharded part of a state, and the rest as the content of `common.pt`."""
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    sharded, common = save_preprocess(content, validate_access_integrity=False)  # torch checks the plan of all ranks
    return sharded, _saved(common)


def signature_of(sharded: dict[str, Any]) -> Signature:
    """Return the names and places of all tensors of this rank, also of those that other replicas write."""
    return tuple(
        (entry.key, tuple(entry.global_offset), tuple(entry.local_shape), str(entry.dtype))
        for entry in _entries(sharded)
        if hasattr(entry, "local_shape")
    )


def rank_content(sharded: dict[str, Any], common: bytes, parameters: Iterable[torch.Tensor]) -> RankContent:
    """Return what this rank writes, once `ReplicaDivision.apply` has marked it.

    Tensors besides the `parameters` of the model and the state of the optimizer, such as the bias of a router, are
    copied: passes change them, and not only the optimizer's update.
    """
    updated = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    mine = [entry for entry in _entries(sharded) if is_main_replica(entry.replica_id)]
    tensors = [entry for entry in mine if isinstance(entry, ShardedTensor)]
    objects = [entry for entry in mine if not isinstance(entry, ShardedTensor)]
    places = [WriteItem(index=MetadataIndex(entry.unique_key), type=WriteItemType.BYTE_IO) for entry in objects]
    return RankContent(
        items=[*(_item(entry) for entry in tensors), *places],
        tensors=[_steady(entry, updated) for entry in tensors],
        objects=[_saved([entry.data]) for entry in objects],
        common=common,
    )


def _steady(entry: Any, updated: set[int]) -> torch.Tensor:  # noqa: ANN401 - ShardedTensor
    """Return a tensor that nothing but an update changes."""
    data: torch.Tensor = entry.data.detach()
    is_updated = entry.key.startswith(OPTIMIZER_PREFIX) or data.untyped_storage().data_ptr() in updated
    return data if is_updated else data.clone()


def _entries(sharded: dict[str, Any]) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    yield from nested_values(sharded)


def _item(entry: Any) -> WriteItem:  # noqa: ANN401 - ShardedTensor
    offsets = torch.Size(entry.global_offset)
    sizes = torch.Size((*(1 for _ in range(entry.prepend_axis_num)), *entry.local_shape))
    return WriteItem(
        index=MetadataIndex(entry.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=entry.dtype),
            size=torch.Size(entry.global_shape),
        ),
    )


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
