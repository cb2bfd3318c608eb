"""Connections of a rank to its partners of the other role and to its neighbours in the pipeline.

Everything but collectives within a role passes here, over the native transport. Each end knows how many messages of a
kind a step has; in which order they are taken is the receiver's choice.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatronapp_common.names import Env
from megatronapp_common.trace import RecordKind, TransferPath
from megatronapp_trainer.errors import TransferError, TransferTimeoutError
from megatronapp_trainer.fbd.channels.agreement import ChannelPaths
from megatronapp_trainer.fbd.channels.messages import MessageCounts, MessageKey, MessageKind
from megatronapp_trainer.fbd.channels.plan import NUMBER_BYTES, ChannelPlan
from megatronapp_trainer.fbd.channels.start import StartExchange
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy, PassKey, TransferObserver
from megatronapp_trainer.pipeline.transport.network import UcxPeers
from megatronapp_trainer.pipeline.transport.tensor_transport import (
    MessagePart,
    ReceivedTensor,
    TensorSpec,
    TensorTransport,
    TransportOptions,
    transfer_path,
)

_log = logging.getLogger(__name__)
_SLICE_S = 2e-4
"""Wait for one transport until the other one is asked: short against a pass."""


class Channel:
    """Messages of one rank. Raises PeerLostError, TransferTimeoutError and TransferError as the transport does."""

    def __init__(
        self,
        plan: ChannelPlan,
        paths: ChannelPaths,
        exchange: StartExchange,
        observer: TransferObserver | None = None,
    ) -> None:
        """Connect to partners and neighbours, through shared memory or UCX; collective over both roles.

        `observer`: of messages with a pass.

        Raises:
            UsageError: a rank cannot use UCX and has peers on other nodes.
            PeerLostError: a rank did not connect.
        """
        self.observer = observer
        """Observer of messages; None where they are not observed."""
        self.deadline_s = plan.deadline_s
        self._leads = plan.leads
        self.partners = plan.partners
        self.activation = plan.activation
        self.device = torch.device("cpu") if plan.device is None else torch.device("cuda", plan.device)
        """Memory that messages are sent from and received in."""
        control = _options(plan, paths, "control", plan.control_bytes, slots=plan.control_slots)
        bulk = _options(plan, paths, f"saved-{plan.unit}", plan.shipment_bytes, slots=plan.shipments)
        self._control, round_trips = _connected(
            control, plan.peers, plan, paths, functools.partial(exchange.gather, "control")
        )
        try:
            self._bulk, _ = _connected(bulk, plan.partners, plan, paths, functools.partial(exchange.gather, "saved"))
        except BaseException:
            self._control.close(drain=False)
            raise
        self._paths = {peer: transfer_path(path) for peer, path in self._control.paths.items()}
        for peer in plan.peers:
            path = self._control.paths[peer]
            if peer in round_trips:
                _log.info("path to rank %d: %s, round trip %.0f us", peer, path, 1e-3 * round_trips[peer])
            else:
                _log.info("path to rank %d: %s", peer, path)
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

    def part(self, offset: int, tensor: torch.Tensor) -> MessagePart:
        """Return a tensor on the channel's device as the part of a message from byte `offset` on."""
        return self._bulk.part(offset, tensor)

    def send_parts(
        self,
        peer: int,
        key: MessageKey,
        parts: Sequence[MessagePart],
        size: int,
        target: PassKey | None = None,
    ) -> None:
        """Start to send one message of `size` bytes, gathered from parts; otherwise as `send`."""
        with self._sending(peer, target, size):
            self._of(key.kind).send_parts(peer, key.pack(), parts, size)
        self.sent.add(peer, key.kind, size)

    def receive(self, peer: int, key: MessageKey, spec: TensorSpec, target: PassKey | None = None) -> torch.Tensor:
        """Wait for a message; it returns to its sender once no tensor on its memory is referenced.

        `target`: the pass that takes it.
        """
        with contextlib.nullcontext() if self.observer is None else self.observer.waiting(), _named(peer, key):
            message = self._of(key.kind).receive(peer, key.pack(), spec)
        self.received.add(peer, key.kind, spec.bytes, message.copied_ns)
        return self._handed_out(message, key, spec, target)

    def poll(self, peer: int, key: MessageKey, spec: TensorSpec, target: PassKey | None = None) -> torch.Tensor | None:
        """Return a message if it has arrived."""
        message = self.poll_message(peer, key, spec)
        return None if message is None else self._handed_out(message, key, spec, target)

    def poll_message(self, peer: int, key: MessageKey, spec: TensorSpec) -> ReceivedTensor | None:
        """Return a message if it has arrived, and announce nothing; `Arrivals` does."""
        with _named(peer, key):
            message = self._of(key.kind).poll(peer, key.pack(), spec)
        if message is not None:
            self.received.add(peer, key.kind, spec.bytes, message.copied_ns)
        return message

    def path_from(self, peer: int) -> TransferPath:
        """Return the path of the messages of a peer."""
        return self._paths[peer]

    def append(self, number: int, target: PassKey | None = None) -> None:
        """Send a number of 64 bits to the partners; each of them reads all numbers in order.

        `target`: the pass whose end it announces.
        """
        with contextlib.ExitStack() as stack:
            for partner in self.partners:
                stack.enter_context(self._sending(partner, target, 0))
            self._control.append(number)
        for partner in self.partners:
            self.sent.add(partner, MessageKind.COMMAND, NUMBER_BYTES)

    def next_number(self, partner: int) -> int:
        """Wait for the next number of a partner."""
        with contextlib.nullcontext() if self.observer is None else self.observer.waiting():
            number = self._control.next_decision(partner)
        self.received.add(partner, MessageKind.COMMAND, NUMBER_BYTES)
        return number

    def poll_number(self, partner: int) -> int | None:
        """Return the next number of a partner if it has arrived."""
        number = self._control.poll_decision(partner)
        if number is not None:
            self.received.add(partner, MessageKind.COMMAND, NUMBER_BYTES)
        return number

    def announce_number(self, partner: int, target: PassKey) -> None:
        """Announce to the observer that a number has arrived. `target`: the pass whose end it says."""
        if self.observer is not None:
            now_ns = time.monotonic_ns()
            self.observer.arrived(target, ObservedCopy(partner, 0, now_ns, now_ns, path=self._paths[partner]))

    def activity(self) -> tuple[int, int]:
        """Return numbers that change with each message, number and failure of a peer. Read them before polling."""
        return self._control.activity(), self._bulk.activity()

    def wait_activity(self, seen: tuple[int, int], limit_s: float) -> bool:
        """Wait until `activity` is not `seen`; return False after `limit_s` seconds."""
        if not self._leads:  # no shipments arrive
            return self._control.wait_activity(seen[0], limit_s)
        deadline = time.monotonic() + limit_s
        while self.activity() == seen:
            if time.monotonic() > deadline:
                return False
            if not self._control.wait_activity(seen[0], _SLICE_S):
                self._bulk.wait_activity(seen[1], _SLICE_S)
        return True

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Announce nothing to the observer within the context: evaluations have no spans."""
        observer, self.observer = self.observer, None
        try:
            yield
        finally:
            self.observer = observer

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
        if self.observer is None or target is None:
            return contextlib.nullcontext()
        return self.observer.sending(peer, target, size)

    def _handed_out(
        self, message: ReceivedTensor, key: MessageKey, spec: TensorSpec, target: PassKey | None
    ) -> torch.Tensor:
        """Announce a message; a fault may withhold it."""
        if self.observer is None:
            return message.tensor
        copy = ObservedCopy(message.sender, spec.bytes, *message.copied_ns, path=self._paths[message.sender])
        if target is None:
            if key.kind is MessageKind.SAVED:
                self.observer.part_arrived(PassKey(RecordKind.FORWARD, key.chunk, key.item), copy)
            return message.tensor
        late_ns = self.observer.release_ns(copy) - time.monotonic_ns()
        if late_ns > 0:
            with self.observer.waiting():
                time.sleep(1e-9 * late_ns)
        self.observer.arrived(target, copy)
        self.observer.take(target)
        return message.tensor

    def _of(self, kind: MessageKind) -> TensorTransport:
        return self._bulk if kind is MessageKind.SAVED else self._control


@contextlib.contextmanager
def _named(peer: int, key: MessageKey) -> Iterator[None]:
    """Name the message in errors of the transport, which knows its key as a number alone."""
    try:
        yield
    except (TransferTimeoutError, TransferError) as error:
        name = f"{key.kind.name.lower()} {key.item} of chunk {key.chunk}, part {key.part}, of command {key.step}"
        raise type(error)(f"{name} from rank {peer}: {error}") from error


def _options(plan: ChannelPlan, paths: ChannelPaths, name: str, slot_bytes: int, *, slots: int) -> TransportOptions:
    return TransportOptions(
        job=f"{paths.job}-{name}",
        attempt=int(os.environ.get(Env.ATTEMPT, "0")),
        rank=plan.rank,
        slot_bytes=max(slot_bytes, 1),
        slots=slots,
        deadline_s=plan.deadline_s,
        threads=plan.threads,
        device=plan.device,
    )


def _connected(
    options: TransportOptions,
    peers: Sequence[int],
    plan: ChannelPlan,
    paths: ChannelPaths,
    gather: Callable[[object], list[Any]],
) -> tuple[TensorTransport, dict[int, int]]:
    """Return a transport with a path to each of these peers, and round trips over UCX; collective over both roles."""
    transport = TensorTransport(options, peers=[peer for peer in peers if peer not in paths.remote])
    remote = UcxPeers(
        [peer for peer in peers if peer in paths.remote], messages=peers, address=plan.address, gather=gather
    )
    return transport, transport.connect(remote if paths.spans_nodes else None)
