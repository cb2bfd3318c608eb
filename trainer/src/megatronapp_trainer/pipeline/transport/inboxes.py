"""Shared memory in which a rank receives from its neighbours, and the agreement of all ranks that there is room."""

import dataclasses
import os
import pathlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from megatronapp_common.names import Env
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.planning.tasks import Placement
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec, shared_memory_directory

MAX_SLOTS = 4096
"""Limit of the native transport (`csrc/include/megatronapp/transport/layout.hpp`)."""
FILE_BYTES = 64 << 10
"""Upper bound of what a file takes beyond its slots, but for `SLOT_BYTES`."""
SLOT_BYTES = 192
"""Upper bound of what a slot takes beyond its message: its announcement, its return, and padding."""


class TaskAddresses(NamedTuple):
    """Ranks of the world that this rank's tasks deal with."""

    pipeline: Sequence[int]
    """By pipeline rank."""
    tensor: Sequence[int]
    """By tensor rank; the first one leads."""


class _Proposal(NamedTuple):
    """Job, memory and needs of a rank, exchanged before any rank takes memory."""

    job: str
    memory: str
    """Identifies the file system in shared memory."""
    needed: int
    free: int | None
    """None for a file system without a limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inboxes:
    """Inboxes of a rank: one for each neighbour in the pipeline."""

    placement: Placement
    addresses: TaskAddresses
    spec: TensorSpec
    """Shape and type of all tensors."""
    peak_chunks: int
    """Most chunks whose activations a rank keeps at a time."""

    @property
    def neighbours(self) -> list[int]:
        """Return the ranks of the world that hold a stage next to one of this rank's."""
        own, placement = self.addresses.pipeline.index(dist.get_rank()), self.placement
        stages = {placement.stage(own, chunk) for chunk in range(placement.chunks)}
        adjacent = {stage + step for stage in stages for step in (-1, 1)} & set(range(placement.stages))
        return [
            self.addresses.pipeline[rank] for rank in sorted({placement.holder(stage)[0] for stage in adjacent} - {own})
        ]

    @property
    def slots(self) -> int:
        """Return the messages from a neighbour that an inbox has room for.

        With one chunk either outputs or gradients go from one rank to another. An output is kept while its sender has
        activations of that microbatch, a gradient while its receiver has; with more chunks both go the same way. One
        more may be on its way, and one not released yet. Raises UsageError for more than the transport has.
        """
        slots = self.peak_chunks * (1 if self.placement.chunks == 1 else 2) + 2
        if slots > MAX_SLOTS:
            raise UsageError(
                f"--use-dpp: activations of {self.peak_chunks} chunks at a time need {slots} slots for messages from "
                f"each neighbour, and there are at most {MAX_SLOTS}; give a smaller --dpp-memory-cap"
            )
        return slots

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a message."""
        return max(self.spec.bytes, 1)

    @property
    def bytes(self) -> int:
        """Return an upper bound of the shared memory that this rank takes."""
        files = 1 + len(self.neighbours) + len(self.addresses.tensor) - 1
        return len(self.neighbours) * self.slots * (self.slot_bytes + SLOT_BYTES) + files * FILE_BYTES

    def agree(self) -> str:
        """Return the name of this job's memory, the same on all ranks; collective over the world.

        Raises:
            UsageError: too many slots, ranks of a pipeline or of a tensor group that share no memory, or too little
                room for the inboxes of all ranks that share it.
        """
        directory, own = shared_memory_directory(), dist.get_rank()
        found: list[_Proposal | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, _proposal(directory, self.bytes))
        proposals = [proposal for proposal in found if proposal is not None]
        memory, free = proposals[own].memory, proposals[own].free
        apart = [
            rank for rank in (*self.addresses.pipeline, *self.addresses.tensor) if proposals[rank].memory != memory
        ]
        if apart:
            raise UsageError(
                f"--use-dpp: rank {own} shares no memory ({directory}) with rank {apart[0]} of its pipeline or tensor "
                "group; put the ranks of a pipeline on one node, or leave --use-dpp out"
            )
        sharing = [proposal.needed for proposal in proposals if proposal.memory == memory]
        if free is not None and sum(sharing) > free:
            raise UsageError(
                f"--use-dpp: {directory} has {free >> 20} MiB free, and messages between its {len(sharing)} ranks need "
                f"{_mib(sum(sharing))} MiB ({self.slots} slots of {self.slot_bytes} bytes for each neighbour of a "
                f"rank); enlarge it (spec.shm.sizeLimit), name a larger tmpfs with {Env.SHM_DIR}, or give a smaller "
                "--micro-batch-size or --dpp-memory-cap"
            )
        return proposals[0].job


def _proposal(directory: str, needed: int) -> _Proposal:
    try:
        status, system = pathlib.Path(directory).stat(), os.statvfs(directory)
    except OSError as error:
        raise UsageError(f"--use-dpp: {directory}: {error.strerror}; set {Env.SHM_DIR} to a tmpfs") from error
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _Proposal(
        job=os.environ.get(Env.JOB_UID) or secrets.token_hex(16),
        memory=f"{boot} {status.st_dev} {status.st_ino}",
        needed=needed,
        free=system.f_bavail * system.f_frsize if system.f_blocks else None,
    )


def _mib(size: int) -> int:
    return -(-size // (1 << 20))
