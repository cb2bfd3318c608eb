"""Memory in which a rank receives from its neighbours, and the agreement of all ranks on where it is shared."""

import dataclasses
import logging
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatronapp_common.names import Env
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.planning.tasks import Placement
from megatronapp_trainer.pipeline.transport.shared_memory import (
    FILE_BYTES,
    find_shared_memory,
    inbox_bytes,
    mebibytes,
)
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec, shared_memory_directory

logger = logging.getLogger(__name__)

MAX_SLOTS = 4096
"""Limit of the native transport (`csrc/include/megatronapp/transport/shm/layout.hpp`)."""


class TaskAddresses(NamedTuple):
    """Ranks of the world that this rank's tasks deal with."""

    pipeline: Sequence[int]
    """By pipeline rank."""
    tensor: Sequence[int]
    """Ranks that meet inside of tasks: those of the tensor group, of each rank that shares a sequence. The first one
    leads."""


class TransportAgreement(NamedTuple):
    """Properties of a job's transport that its ranks agree on before any of them takes memory."""

    job: str
    """Name of this job's memory, the same on all ranks."""
    remote: tuple[int, ...]
    """Peers of this rank with which it shares no memory."""
    spans_nodes: bool
    """True if any rank has such peers."""
    pinned: bool
    """Slots of messages between devices are in pinned host memory, not in memory of the devices."""


class _Reach(NamedTuple):
    """Devices by their UUID, as one rank sees them."""

    own: str
    visible: frozenset[str]
    reached: frozenset[str]
    """UUIDs of the devices whose memory its own device reads and writes."""


class _Proposal(NamedTuple):
    """Job, memory and needs of a rank, exchanged before any rank takes memory."""

    job: str
    memory: str
    """Identifies the file system in shared memory."""
    neighbours: tuple[int, ...]
    boards: tuple[int, ...]
    """Peers with which only progress and decisions are exchanged."""
    inbox_bytes: int
    pinned_bytes: int
    """`inbox_bytes` with slots in pinned host memory."""
    free: int | None
    """None for a file system without a limit."""
    reach: _Reach | None
    """None for a rank without a device."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inboxes:
    """Inboxes of a rank: one for each neighbour in the pipeline."""

    placement: Placement
    addresses: TaskAddresses
    spec: TensorSpec
    """Shape and type of all tensors."""
    peak_chunks: int
    """Most chunks whose activations a rank keeps at a time."""
    flag: str = "--use-dpp"
    """Flag that needs them, for messages."""
    device: int | None = None
    """Ordinal of this rank's CUDA device, which then holds the slots; None for tensors of the host."""
    address: str = ""
    """Address of this rank for peers on other nodes; UCX chooses a device if it is empty."""

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
                f"{self.flag}: activations of {self.peak_chunks} chunks at a time need {slots} slots for messages from "
                f"each neighbour, and there are at most {MAX_SLOTS}; give a smaller --dpp-memory-cap, or fewer stages"
            )
        return slots

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a message."""
        return max(self.spec.bytes, 1)

    @property
    def inbox_bytes(self) -> int:
        """Return an upper bound of the shared memory of one inbox; slots of a device are in its own memory."""
        return inbox_bytes(self.slots, self.slot_bytes, on_device=self.device is not None)

    @property
    def pinned_bytes(self) -> int:
        """Return the same with all slots in it."""
        return inbox_bytes(self.slots, self.slot_bytes, on_device=False)

    @property
    def bytes(self) -> int:
        """Return an upper bound of the shared memory that this rank takes if all its peers share it."""
        return len(self.neighbours) * self.inbox_bytes + len(self.addresses.tensor) * FILE_BYTES

    @property
    def boards(self) -> list[int]:
        """Return the other ranks of the tensor group."""
        return [rank for rank in self.addresses.tensor if rank != dist.get_rank()]

    def agree(self) -> TransportAgreement:
        """Agree on the job and on where memory is shared; collective over the world.

        Slots between devices of a node are in their memory, unless a rank's device does not reach the device of a
        neighbour: then they are in pinned host memory, on all ranks, which is logged. Messages between a device and a
        rank on another node, or one without a device, pass through pinned host memory in any case.

        Raises:
            UsageError: too many slots, or too little room for the inboxes of all ranks that share a memory.
        """
        directory, own = shared_memory_directory(), dist.get_rank()
        found: list[_Proposal | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self._proposal())
        proposals = [proposal for proposal in found if proposal is not None]
        apart = [_apart(proposal, proposals) for proposal in proposals]
        memory, free = proposals[own].memory, proposals[own].free
        apart_devices = _devices_apart(proposals)
        if apart_devices:
            proposals = [proposal._replace(inbox_bytes=proposal.pinned_bytes) for proposal in proposals]
        sharing = [_needed(proposal, proposals) for proposal in proposals if proposal.memory == memory]
        if free is not None and sum(sharing) > free:
            raise UsageError(
                f"{self.flag}: {directory} has {free >> 20} MiB free, and messages between its {len(sharing)} ranks "
                f"need {mebibytes(sum(sharing))} MiB ({self.slots} slots of {self.slot_bytes} bytes for each neighbour "
                f"of a rank); enlarge it (spec.shm.sizeLimit), name a larger tmpfs with {Env.SHM_DIR}, or give a "
                "smaller --micro-batch-size or --dpp-memory-cap"
            )
        if apart_devices and own == 0:
            logger.warning(
                "devices of ranks %d and %d do not reach each other: messages of %s pass through pinned host memory",
                *apart_devices,
                self.flag,
            )
        return TransportAgreement(proposals[0].job, apart[own], any(apart), pinned=apart_devices is not None)

    def _proposal(self) -> _Proposal:
        memory = find_shared_memory(self.flag)
        return _Proposal(
            job=os.environ.get(Env.JOB_UID) or secrets.token_hex(16),
            memory=memory.identity,
            neighbours=tuple(self.neighbours),
            boards=tuple(self.boards),
            inbox_bytes=self.inbox_bytes,
            pinned_bytes=self.pinned_bytes,
            free=memory.free,
            reach=None if self.device is None else _reach(self.device),
        )


def inboxes_of(config: TrainerConfig, layout: Layout, plan: DppPlan) -> Inboxes:
    """Return the inboxes of this rank for a plan."""
    from megatron.core import parallel_state

    addresses = TaskAddresses(
        pipeline=pipeline_ranks(),
        tensor=dist.get_process_group_ranks(parallel_state.get_tensor_and_context_parallel_group()),
    )
    return inboxes_at(config, layout, plan, addresses)


def inboxes_at(config: TrainerConfig, layout: Layout, plan: DppPlan, addresses: TaskAddresses) -> Inboxes:
    """Return the inboxes of this rank for a plan, with the ranks of its pipeline and tensor group."""
    length = config.model.seq_length // layout.context_size
    if config.parallel.sequence_parallel:
        length //= layout.tensor_size
    shape = (length, config.training.micro_batch_size, config.model.hidden_size)
    dtype = config.precision.dtype
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    given = config.dpp.addresses
    return Inboxes(
        plan.placement,
        addresses,
        TensorSpec(shape, dtype),
        plan.peak_chunks(config.most_microbatches(layout.data_size)),
        device=device,
        address=given[dist.get_rank()] if given else os.environ.get(Env.ADDRESS, ""),
    )


def pipeline_ranks() -> list[int]:
    """Return the ranks of the world that hold this rank's pipeline, by pipeline rank."""
    from megatron.core import parallel_state

    ranks: list[int] = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return ranks


def _reach(device: int) -> _Reach:
    uuids = [str(torch.cuda.get_device_properties(other).uuid) for other in range(torch.cuda.device_count())]
    reached = [
        uuid for other, uuid in enumerate(uuids) if other == device or torch.cuda.can_device_access_peer(device, other)
    ]
    return _Reach(uuids[device], frozenset(uuids), frozenset(reached))


def _devices_apart(proposals: Sequence[_Proposal]) -> tuple[int, int] | None:
    """Return the first neighbours of which one's device does not reach the other's.

    A device that a rank does not see is taken to be within reach: the transport then tries it, and says so if not.
    """
    for rank, proposal in enumerate(proposals):
        for neighbour in proposal.neighbours:
            reach, other = proposal.reach, proposals[neighbour].reach
            if reach and other and other.own in reach.visible - reach.reached:
                return rank, neighbour
    return None


def _apart(proposal: _Proposal, proposals: Sequence[_Proposal]) -> tuple[int, ...]:
    """Return the peers of a rank that do not share its memory."""
    peers = dict.fromkeys((*proposal.neighbours, *proposal.boards))
    return tuple(peer for peer in peers if proposals[peer].memory != proposal.memory)


def _needed(proposal: _Proposal, proposals: Sequence[_Proposal]) -> int:
    """Return an upper bound of the shared memory that a rank takes; messages of other nodes take none.

    Messages of a rank without a device are in host memory, also where the receiver has one.
    """
    needed = (1 + len(proposal.boards)) * FILE_BYTES
    for peer in proposal.neighbours:
        if proposals[peer].memory == proposal.memory:
            has_device = proposals[peer].reach is not None
            needed += proposal.inbox_bytes if has_device else proposal.pinned_bytes
    return needed
