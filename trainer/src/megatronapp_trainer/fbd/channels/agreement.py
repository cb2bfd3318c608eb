"""Agreement of all ranks on the paths of their channels, before any of them takes memory."""

import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from megatronapp_common.names import Env
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.fbd.channels.plan import ChannelPlan
from megatronapp_trainer.fbd.channels.start import StartExchange
from megatronapp_trainer.pipeline.transport.inboxes import MAX_SLOTS
from megatronapp_trainer.pipeline.transport.shared_memory import (
    FILE_BYTES,
    find_shared_memory,
    inbox_bytes,
    mebibytes,
)
from megatronapp_trainer.pipeline.transport.tensor_transport import shared_memory_directory

_FLAG = "--forward-backward-disaggregating"


class ChannelPaths(NamedTuple):
    """Paths of this rank's channels."""

    job: str
    """Name of the job's memory, the same on all ranks."""
    remote: tuple[int, ...]
    """Peers of this rank with which it shares no memory; UCX reaches them."""
    spans_nodes: bool
    """True if any rank has such peers."""


class _ChannelProposal(NamedTuple):
    """Job, memory and needs of a rank, exchanged before any rank takes memory."""

    job: str
    memory: str
    """Identifies the file system in shared memory."""
    free: int | None
    """None for a file system without a limit."""
    inboxes: dict[int, int]
    """Bytes of shared memory for messages of each peer, if it shares the memory."""
    host_inboxes: dict[int, int]
    """`inboxes` with the slots in shared memory, as for messages of peers without a device."""
    has_device: bool


def agree(plan: ChannelPlan, exchange: StartExchange) -> ChannelPaths:
    """Agree on the job and on where memory is shared; collective over both roles.

    Raises:
        UsageError: too many shipments or other messages at a time, or too little room for the messages of all ranks
            that share a memory.
    """
    if plan.shipments > MAX_SLOTS:
        raise UsageError(
            f"{_FLAG}: rank {plan.rank} needs room for {plan.shipments} messages of saved tensors at a time, and there "
            f"are at most {MAX_SLOTS}; give more pipeline stages, so that a rank has fewer layers"
        )
    if plan.control_slots > MAX_SLOTS:
        raise UsageError(
            f"{_FLAG}: with --use-dpp rank {plan.rank} needs room for {plan.control_slots} messages of another rank at "
            f"a time, and there are at most {MAX_SLOTS}; give a smaller --fbd-backward-per-forward, or take "
            "--dpp-schedule static"
        )
    memory = find_shared_memory(_FLAG)
    has_device = plan.device is not None
    own = _ChannelProposal(
        job=os.environ.get(Env.JOB_UID) or secrets.token_hex(16),
        memory=memory.identity,
        free=memory.free,
        inboxes=_inboxes(plan, on_device=has_device),
        host_inboxes=_inboxes(plan, on_device=False),
        has_device=has_device,
    )
    proposals: list[_ChannelProposal] = exchange.gather("channels", own)
    apart = [_apart(proposal, proposals) for proposal in proposals]
    sharing = [_needed(proposal, proposals) for proposal in proposals if proposal.memory == memory.identity]
    if memory.free is not None and sum(sharing) > memory.free:
        raise UsageError(
            f"{_FLAG}: {shared_memory_directory()} has {memory.free >> 20} MiB free, and messages between its "
            f"{len(sharing)} ranks need {mebibytes(sum(sharing))} MiB (rank {plan.rank}: {plan.shipments} of "
            f"{plan.shipment_bytes} bytes with saved tensors for each partner, {plan.control_slots} of "
            f"{plan.control_bytes} bytes for each peer); enlarge it (spec.shm.sizeLimit), name a larger tmpfs with "
            f"{Env.SHM_DIR}, or give a smaller --micro-batch-size or --recompute-granularity full"
        )
    return ChannelPaths(proposals[0].job, apart[plan.rank], any(apart))


def _inboxes(plan: ChannelPlan, *, on_device: bool) -> dict[int, int]:
    """Return the bytes of shared memory for messages of each peer."""
    control = inbox_bytes(plan.control_slots, plan.control_bytes, on_device=on_device)
    saved = inbox_bytes(plan.shipments, plan.shipment_bytes, on_device=on_device)
    return {peer: control + (saved if peer in plan.partners else 0) for peer in plan.peers}


def _apart(proposal: _ChannelProposal, proposals: Sequence[_ChannelProposal]) -> tuple[int, ...]:
    """Return the peers of a rank that do not share its memory."""
    return tuple(peer for peer in proposal.inboxes if proposals[peer].memory != proposal.memory)


def _needed(proposal: _ChannelProposal, proposals: Sequence[_ChannelProposal]) -> int:
    """Return an upper bound of the shared memory that a rank takes; messages of other nodes take none."""
    needed = 2 * FILE_BYTES
    for peer in proposal.inboxes:
        if proposals[peer].memory == proposal.memory:
            inboxes = proposal.inboxes if proposals[peer].has_device else proposal.host_inboxes
            needed += inboxes[peer]
    return needed
