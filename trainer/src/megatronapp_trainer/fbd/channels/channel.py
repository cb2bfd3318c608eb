"""Connections of a rank to its partners of the other role and to its neighbours in the pipeline.

Everything but collectives within a role passes here, over the native transport. All channels are ordered statically:
each end knows which message is next, and how many of a kind a step has.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence

import torch

from megatronapp_common.names import Env
from megatronapp_common.trace import TransferPath
from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.channels.messages import MessageCounts, MessageKey, MessageKind
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy, PassKey, TransferObserver
from megatronapp_trainer.pipeline.transport.tensor_transport import (
    ReceivedTensor,
    TensorSpec,
    TensorTransport,
    TransportOptions,
)

CONTROL_SLOTS = 16
WEIGHT_PART_BYTES = 4 << 20
"""Most bytes of parameters in a message: small enough that copying in and out overlap."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChannelPlan:
    """Peers of a rank and the sizes of their messages; ranks are those of the launcher."""

    job: str
    """Name of the job's shared memory, equal on all ranks."""
    rank: int
    unit: int
    """Forward rank of this rank and its partners."""
    partners: tuple[int, ...]
    """Backward ranks of a forward rank, or the forward rank of a backward rank."""
    leads: bool
    """True on backward ranks, which command their partner and give it credits."""
    neighbours: tuple[int, ...]
    """Ranks of the same role that hold the stages before and after."""
    activation: TensorSpec
    """Hidden states between two stages."""
    control_bytes: int
    """Bytes of the largest message that is no shipment; equal on all ranks of the job."""
    shipment_bytes: int
    """Bytes of the largest shipment of saved tensors."""
    shipments: int
    """Shipments that a backward rank has room for."""
    deadline_s: float
    device: int | None
    threads: int


class Channel:
    """Messages of one rank. Raises PeerLostError, TransferTimeoutError and TransferError as the transport does."""

    def __init__(self, plan: ChannelPlan, observer: TransferObserver | None = None) -> None:
        """Connect to partners and neighbours; each of them does the same. `observer`: of messages with a pass."""
        self._plan = plan
        self._observer = observer
        self._path = TransferPath.SHARED_MEMORY if plan.device is None else TransferPath.CUDA_IPC
        self.partners = plan.partners
        self.activation = plan.activation
        peers = [*plan.partners, *plan.neighbours]
        self._control = _transport(plan, "control", peers, plan.control_bytes, slots=CONTROL_SLOTS)
        self._bulk = _transport(
            plan, f"saved-{plan.unit}", list(plan.partners), plan.shipment_bytes, slots=plan.shipments
        )
        for transport in (self._control, self._bulk):
            transport.connect()
        if plan.leads:
            self._control.lead(plan.partners)
        self.sent = MessageCounts()
        self.received = MessageCounts()

    def send(self, peer: int, key: MessageKey, tensor: torch.Tensor, target: PassKey | None = None) -> None:
        """Start to send; the tensor is not changed before it has left. `target`: the pass that takes it."""
        size = tensor.numel() * tensor.element_size()
        with self._sending(peer, target, size):
            self._of(key.kind).send(peer, key.pack(), tensor)
        self.sent.add(peer, key.kind, size)

    def receive(self, peer: int, key: MessageKey, spec: TensorSpec, target: PassKey | None = None) -> torch.Tensor:
        """Wait for a message; it returns to its sender once no tensor on its memory is referenced.

        `target`: the pass that takes it.
        """
        with contextlib.nullcontext() if self._observer is None else self._observer.waiting():
            message = self._of(key.kind).receive(peer, key.pack(), spec)
        return self._handed_out(message, key, spec, target)

    def poll(self, peer: int, key: MessageKey, spec: TensorSpec, target: PassKey | None = None) -> torch.Tensor | None:
        """Return a message if it has arrived."""
        message = self._of(key.kind).poll(peer, key.pack(), spec)
        return None if message is None else self._handed_out(message, key, spec, target)

    def append(self, number: int, target: PassKey | None = None) -> None:
        """Send a number of 64 bits to the partners; each of them reads all numbers in order.

        `target`: the pass whose end it announces.
        """
        with contextlib.ExitStack() as stack:
            for partner in self.partners:
                stack.enter_context(self._sending(partner, target, 0))
            self._control.append(number)

    def next_number(self, partner: int, target: PassKey | None = None) -> int:
        """Wait for the next number of a partner."""
        with contextlib.nullcontext() if self._observer is None else self._observer.waiting():
            number = self._control.next_decision(partner)
        if self._observer is not None and target is not None:
            now_ns = time.monotonic_ns()
            self._observer.arrived(target, ObservedCopy(partner, 0, now_ns, now_ns))
            self._observer.take(target)
        return number

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Announce nothing to the observer within the context: evaluations have no spans."""
        observer, self._observer = self._observer, None
        try:
            yield
        finally:
            self._observer = observer

    def refuse_unread(self, step: int) -> None:
        """Raise TransferError if a message of a partner has arrived that was not expected in this step."""
        for transport in (self._control, self._bulk):
            for message in transport.take_arrived(self.partners, None):
                raise TransferError(
                    f"step {step}: {MessageKey.unpack(message.key)} has arrived from rank {message.sender}, and is not "
                    "expected"
                )

    def close(self, *, drain: bool = True) -> None:
        """End the connections; `drain`: deliver first what was sent."""
        for transport in (self._bulk, self._control):
            transport.close(drain=drain)

    def _sending(self, peer: int, target: PassKey | None, size: int) -> contextlib.AbstractContextManager[None]:
        if self._observer is None or target is None:
            return contextlib.nullcontext()
        return self._observer.sending(peer, target, size)

    def _handed_out(
        self, message: ReceivedTensor, key: MessageKey, spec: TensorSpec, target: PassKey | None
    ) -> torch.Tensor:
        """Count a message and announce it; a fault may withhold it."""
        self.received.add(message.sender, key.kind, spec.bytes)
        if self._observer is not None and target is not None:
            copy = ObservedCopy(message.sender, spec.bytes, *message.copied_ns, path=self._path)
            late_ns = self._observer.release_ns(copy) - time.monotonic_ns()
            if late_ns > 0:
                with self._observer.waiting():
                    time.sleep(1e-9 * late_ns)
            self._observer.arrived(target, copy)
            self._observer.take(target)
        return message.tensor

    def _of(self, kind: MessageKind) -> TensorTransport:
        return self._bulk if kind is MessageKind.SAVED else self._control


def _transport(plan: ChannelPlan, name: str, peers: Sequence[int], slot_bytes: int, *, slots: int) -> TensorTransport:
    options = TransportOptions(
        job=f"{plan.job}-{name}",
        attempt=int(os.environ.get(Env.ATTEMPT, "0")),
        rank=plan.rank,
        slot_bytes=max(slot_bytes, 1),
        slots=slots,
        deadline_s=plan.deadline_s,
        threads=plan.threads,
        device=plan.device,
    )
    return TensorTransport(options, peers=peers)
