"""The native transport in the place of megatron-core's transfers, for its own schedules."""

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_common.names import Env
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.transport import PostedTransfers, TransferRequest
from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.planning.tasks import Placement
from megatronapp_trainer.pipeline.transport.inboxes import Inboxes, TaskAddresses, inboxes_of
from megatronapp_trainer.pipeline.transport.network import connected
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec, TensorTransport, TransportOptions

TO_NEXT = 0 << 62
"""Bit of the keys of outputs of forward passes."""
TO_PREVIOUS = 1 << 62
"""Bit of the keys of gradients. With two ranks, both neighbours are the same rank."""


class StageTransport:
    """A `Transport` between memories of hosts.

    The n-th tensor from one stage to the next has the key n, as each of the two stages posts its transfers with the
    other in one order.

    A received tensor is a view of its slot, which is the sender's again once nothing refers to the tensor.
    """

    def __init__(self, inboxes: Inboxes, *, threads: int, deadline_s: float) -> None:
        """Connect to both neighbours in the pipeline; collective over the world.

        Args:
            inboxes: of this rank.
            threads: threads that copy messages of this rank.
            deadline_s: seconds after which a rank that sends nothing is an error.

        Raises:
            UsageError: too little shared memory, or no path to a rank on another node.
            PeerLostError: a rank did not connect.
        """
        pipeline = inboxes.addresses.pipeline
        place = pipeline.index(dist.get_rank())
        self._next_rank = pipeline[(place + 1) % len(pipeline)]
        self._prev_rank = pipeline[(place - 1) % len(pipeline)]
        self._dtype = inboxes.spec.dtype
        agreement = inboxes.agree()
        options = TransportOptions(
            job=agreement.job,
            attempt=int(os.environ.get(Env.ATTEMPT, "0")),
            rank=dist.get_rank(),
            slot_bytes=inboxes.slot_bytes,
            slots=inboxes.slots,
            threads=threads,
            deadline_s=deadline_s,
        )
        self._transport = connected(options, inboxes, agreement)
        self._posted = {"send_next": 0, "send_prev": 0, "recv_prev": 0, "recv_next": 0}

    @property
    def next_rank(self) -> int:
        """Global rank of the next stage; of the last stage the first one."""
        return self._next_rank

    @property
    def prev_rank(self) -> int:
        """Global rank of the previous stage; of the first stage the last one."""
        return self._prev_rank

    def post(
        self,
        *,
        send_next: torch.Tensor | None,
        send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,  # noqa: ANN401 - list of int or torch.Size
    ) -> PostedTransfers:
        """Start to send, and return tensors that have their contents once their request was waited for.

        Raises:
            PeerLostError: a neighbour is lost.
        """
        requests: dict[str, TransferRequest] = {}
        if send_next is not None:
            requests["send_next"] = self._send("send_next", self._next_rank, TO_NEXT, send_next)
        if send_prev is not None:
            requests["send_prev"] = self._send("send_prev", self._prev_rank, TO_PREVIOUS, send_prev)
        from_prev = from_next = None
        if recv_prev:
            key = self._key("recv_prev", TO_NEXT)
            requests["recv_prev"] = receive = self._receive(self._prev_rank, key, tensor_shape)
            from_prev = receive.tensor
        if recv_next:
            key = self._key("recv_next", TO_PREVIOUS)
            requests["recv_next"] = receive = self._receive(self._next_rank, key, tensor_shape)
            from_next = receive.tensor
        return PostedTransfers(from_prev, from_next, requests)

    def close(self, *, drain: bool = True) -> None:
        """End the transport; with `drain`, what was sent is delivered first."""
        self._transport.close(drain=drain)

    def _send(self, name: str, peer: int, direction: int, tensor: torch.Tensor) -> "SentTensor":
        self._transport.send(peer, self._key(name, direction), tensor)
        return SentTensor()

    def _receive(self, peer: int, key: int, shape: Any) -> "AwaitedTensor":  # noqa: ANN401 - list of int or torch.Size
        return AwaitedTensor(self._transport, peer, key, TensorSpec(tuple(shape), self._dtype))

    def _key(self, name: str, direction: int) -> int:
        number = self._posted[name]
        self._posted[name] += 1
        return direction | number


class SentTensor:
    """The request of a send. The transport refers to the tensor's memory until it is copied."""

    def wait(self) -> None:
        """Return at once: megatron-core drops a tensor that it has sent, and writes into none."""


class AwaitedTensor:
    """The request of a receive."""

    def __init__(self, transport: TensorTransport, peer: int, key: int, spec: TensorSpec) -> None:
        self._transport: TensorTransport | None = transport
        self._peer = peer
        self._key = key
        self._spec = spec
        # Shape and type are known, and memory is not needed before the tensor is there.
        self.tensor = torch.empty((), dtype=spec.dtype).expand(spec.shape).requires_grad_()

    def wait(self) -> None:
        """Wait until the tensor has arrived; a second call returns at once.

        Raises:
            PeerLostError: the sender is lost, or sent nothing before the deadline.
        """
        if self._transport is not None:
            self.tensor.data = self._transport.receive(self._peer, self._key, self._spec).tensor
            self._transport = None


def stage_inboxes(config: TrainerConfig, layout: Layout) -> Inboxes:
    """Return the inboxes of this rank for megatron-core's schedules."""
    placement = Placement(layout.pipeline_size, layout.virtual_size)
    plan = DppPlan(dataclasses.replace(config.dpp, dpp_schedule="static"), placement)
    inboxes = inboxes_of(config, layout, plan)
    alone = TaskAddresses(inboxes.addresses.pipeline, (dist.get_rank(),))
    return dataclasses.replace(inboxes, addresses=alone, flag="--transport native")


def check_stage_memory(config: TrainerConfig, layout: Layout) -> None:
    """Compare the shared memory of all ranks with what they need, before a model is built; collective over the world.

    Raises:
        UsageError: too little shared memory.
    """
    inboxes = stage_inboxes(config, layout)
    if inboxes.device is not None:
        raise UsageError(
            f"{inboxes.flag} carries tensors of CPU ranks, and these ranks have GPUs: give --use-dpp as well, or leave "
            f"{inboxes.flag} out, so that NCCL carries them"
        )
    inboxes.agree()


def connect_stages(config: TrainerConfig, layout: Layout) -> StageTransport:
    """Connect the stages of this rank's pipeline; collective over the world. Raises as `StageTransport` does."""
    return StageTransport(
        stage_inboxes(config, layout),
        threads=config.dpp.threads,
        deadline_s=60 * config.parallel.distributed_timeout_minutes,
    )
