"""Files of a checkpoint: the data file of each rank, and what is written once for all. Used by any process.

The format is torch's distributed checkpoint with megatron-core's names, written by torch's own file writer.
"""

import contextlib
import errno
import functools
import io
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatronapp_trainer.checkpoint.checksums import WrittenFile
from megatronapp_trainer.checkpoint.directory import CheckpointDirectory, Manifest, OwnershipClaim
from megatronapp_trainer.checkpoint.writer import CORE_FORMAT, ChecksummingWriter
from megatronapp_trainer.data import text_tokens
from megatronapp_trainer.errors import StorageError
from megatronapp_trainer.utils.atomic_files import retry_transient_errors

VISIBLE_WITHIN_S = 60.0
"""Seconds for which a file or folder of another node may be hidden by the cache of a network file system."""
_POLL_INTERVAL_S = 0.5

ReadTensor = Callable[[int], torch.Tensor]
"""Returns the tensor of the item with this number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDataFile:
    """The data file of a rank, synced to the disk."""

    places: list[tuple[str, int, int]]
    """File, first byte and length of each item, in the order of the items."""
    files: dict[str, WrittenFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalPlan:
    """Items of all ranks, and what torch's reader needs to know of them."""

    metadata: Metadata
    indices: list[list[MetadataIndex]]
    """For each rank, names and offsets of its items."""


def plan_of(ranks: Sequence[list[WriteItem]]) -> GlobalPlan:
    """Join the items of all ranks.

    Raises:
        ValueError: they overlap, or do not cover every tensor.
        AssertionError: two ranks write the same object.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    _, metadata = planner.create_global_plan([SavePlan(items) for items in ranks])
    return GlobalPlan(metadata=metadata, indices=[[item.index for item in items] for items in ranks])


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """All that is needed, besides the data files, to publish a checkpoint."""

    directory: pathlib.Path
    manifest: Manifest
    claim: OwnershipClaim
    text_tokens: bytes | None
    keep: int | None

    @property
    def temporary(self) -> pathlib.Path:
        """Return the folder in which the files are written."""
        return CheckpointDirectory(self.directory).temporary(self.manifest.iteration, self.claim)

    def begin(self) -> None:
        """Create this folder, empty. Raises OSError, SupersededError or StorageError."""
        CheckpointDirectory(self.directory).begin(self.manifest.iteration, self.claim)

    def finish(self, common: bytes, plan: GlobalPlan, ranks: Sequence[RankDataFile]) -> None:
        """Write `common` and the remaining small files, give the checkpoint its name, and delete old ones.

        Raises:
            OSError: a file cannot be written, or a rank's file is missing.
            SupersededError: another claim owns the directory.
            StorageError: the owner cannot be read.
        """
        folder = self.temporary
        written = {name: file for rank in ranks for name, file in rank.files.items()}
        _wait_for(folder, written)
        (folder / "common.pt").write_bytes(common)
        (folder / "metadata.json").write_text(json.dumps(CORE_FORMAT), encoding="utf-8")
        if self.text_tokens is not None:
            (folder / text_tokens.FILE).write_bytes(self.text_tokens)
        _write_metadata(folder, plan, ranks)
        directory = CheckpointDirectory(self.directory)
        directory.publish(folder, self.manifest, self.claim, written)
        if self.keep is not None:
            directory.prune(self.keep, self.claim, published=self.manifest.iteration)


class _Planner(DefaultSavePlanner):
    """Reads every tensor at the moment when it is written."""

    def __init__(self, numbers: Mapping[MetadataIndex, int], tensor: ReadTensor, objects: Sequence[bytes]) -> None:
        super().__init__(flatten_state_dict=False)
        self._numbers = numbers
        self._tensor = tensor
        self._objects = objects

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        number = self._numbers[write_item.index]
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[number - len(self._numbers) + len(self._objects)])
        assert write_item.tensor_data is not None
        return self._tensor(number).contiguous().view(write_item.tensor_data.chunk.sizes)


def write_rank_file(
    folder: pathlib.Path, rank: int, items: list[WriteItem], tensor: ReadTensor, objects: Sequence[bytes]
) -> RankDataFile:
    """Write the data file of a rank and sync it; `objects` belong to the last items.

    Raises:
        OSError: it could not be written, or the folder does not exist.
    """
    writer = ChecksummingWriter(folder)
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(SavePlan(items))
    numbers = {item.index: number for number, item in enumerate(items)}
    try:
        results = writer.write_data(plan, _Planner(numbers, tensor, objects)).wait()
    except RuntimeError as error:
        if "unexpected pos" in str(error):  # torch's archive writer replaces the system's reason by this text
            raise OSError(
                errno.ENOSPC, f"a file could not be written to its end, as on a full disk or quota ({error})"
            ) from error
        raise
    places: list[tuple[str, int, int]] = [("", 0, 0)] * len(items)
    for result in results:
        info = result.storage_data
        places[numbers[result.index]] = (info.relative_path, info.offset, info.length)
    return RankDataFile(places=places, files=writer.written())


def _write_metadata(folder: pathlib.Path, plan: GlobalPlan, ranks: Sequence[RankDataFile]) -> None:
    results = [
        [
            WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(name, offset, length))
            for index, (name, offset, length) in zip(indices, rank.places, strict=True)
        ]
        for indices, rank in zip(plan.indices, ranks, strict=True)
    ]
    ChecksummingWriter(folder).finish(plan.metadata, results)


def require_shared(folder: pathlib.Path) -> None:
    """Wait until a folder is visible that another node may have made.

    Raises StorageError if it is not in time.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not folder.is_dir():
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{folder} could not be seen from here for {VISIBLE_WITHIN_S:.0f} s; --save and --load must name a "
                "directory that all nodes share"
            )
        time.sleep(_POLL_INTERVAL_S)
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)  # NFS then asks its server again


def _wait_for(folder: pathlib.Path, files: Mapping[str, WrittenFile]) -> None:
    """Wait until the files of other nodes are seen. Raises StorageError if one is not, or has another size."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    for name, file in files.items():
        while _size(folder / name) != file.size:
            if time.monotonic() >= deadline or not folder.is_dir():
                raise StorageError(f"{folder / name}, which a rank has written, is missing or has another size")
            time.sleep(_POLL_INTERVAL_S)
            os.listdir(folder)  # NFS then asks its server again


def _size(path: pathlib.Path) -> int | None:
    try:
        return retry_transient_errors(functools.partial(os.stat, path)).st_size
    except FileNotFoundError:
        return None
