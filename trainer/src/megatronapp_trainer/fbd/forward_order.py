"""Order of the forward passes of a step as a forward rank runs them: static, or as inputs and credits arrive."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.channels.arrivals import Arrivals, AwaitedMessage
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.commands import Command, Order
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.choice import ForwardChoice
from megatronapp_trainer.fbd.orders import Pass, PassOrders, forward_order
from megatronapp_trainer.fbd.stage import Stage
from megatronapp_trainer.hooks.transfer_observer import PassKey


class NextForward(NamedTuple):
    """A forward pass that runs now."""

    replica: int
    """Index among the replicas of the rank."""
    own: Pass
    received: torch.Tensor | None
    """Input of the chunk; None on the first stage."""
    early: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardRankStep:
    """A training step on a forward rank."""

    channel: Channel
    stage: Stage
    orders: PassOrders
    partners: Sequence[tuple[int, ...]]
    """By replica, the backward ranks that give credits: one, or a tensor group with a merged forward rank."""
    number: int
    """Number of its command."""
    num_microbatches: int

    def input_message(self, own: Pass, replica: int) -> AwaitedMessage:
        """Return the message with the input of a pass, which is not on the first stage."""
        item = own.microbatch * len(self.partners) + replica
        return _input_message(self.channel, self.stage, self.number, item, own.chunk)

    def credited_pass(self, number: int, partner: int) -> Pass:
        """Return the backward pass that a partner's credit names. Raises TransferError for another number."""
        order = Order.unpack(number)
        if order.command is not Command.CREDIT:
            raise TransferError(
                f"step {self.number}: rank {partner} commands {order} before the step has ended; it must give a credit "
                "for each backward pass first"
            )
        return Pass(*order.ended)


class ForwardOrder(Protocol):
    """Forward passes of one step."""

    def passes(self, await_device: Callable[[], None]) -> Iterator[NextForward]:
        """Yield each pass once it may run. `await_device`: waits until the device may get a pass.

        Raises:
            PeerLostError: a rank is lost or takes too long.
            TransferError: a backward rank has sent another number than a credit of the step.
        """

    def take_credits(self, replica: int) -> None:
        """Wait until the backward passes of a replica have ended, after all forward passes have run."""


class StaticForwardOrder:
    """Runs the static order, and each pass for one replica after the other; waits for credit and input of each."""

    def __init__(self, step: ForwardRankStep) -> None:
        self._step = step
        self._order = forward_order(step.stage.placement, step.num_microbatches, step.stage.rank)
        self._credits = [step.orders.places(step.num_microbatches, step.stage.rank)] * len(step.partners)
        self._awaited = [len(self._order)] * len(step.partners)
        """By replica, the number of backward passes for which no credit has arrived."""

    def passes(self, await_device: Callable[[], None]) -> Iterator[NextForward]:
        """Yield the passes in their order."""
        step = self._step
        for own in self._order:
            for replica in range(len(step.partners)):
                while not self._credits[replica]:
                    self._take_credit(replica)
                self._credits[replica] -= 1
                await_device()
                item = own.microbatch * len(step.partners) + replica
                yield NextForward(
                    replica, own, receive_input(step.channel, step.stage, step.number, item, own.chunk), early=False
                )

    def take_credits(self, replica: int) -> None:
        """Wait for the credits that have not arrived."""
        while self._awaited[replica]:
            self._take_credit(replica)

    def _take_credit(self, replica: int) -> None:
        channel = self._step.channel
        for partner in self._step.partners[replica]:
            ended = self._step.credited_pass(channel.next_number(partner), partner)
            target = PassKey(RecordKind.BACKWARD, ended.chunk, ended.microbatch)
            channel.announce_number(partner, target)
            if channel.observer is not None:
                channel.observer.take(target)
        self._credits[replica] += 1
        self._awaited[replica] -= 1


class DynamicForwardOrder:
    """Runs the pass that the policy of MegaDPP's schedule names, of any replica; waits only while it names none."""

    def __init__(self, step: ForwardRankStep) -> None:
        self._step = step
        self._partners = [partner for (partner,) in step.partners]
        self._choice = ForwardChoice(step.orders, step.stage.rank, step.num_microbatches, len(step.partners))
        self._arrivals = Arrivals(step.channel, step.number)
        self._inputs: dict[tuple[int, Pass], torch.Tensor] = {}

    def passes(self, await_device: Callable[[], None]) -> Iterator[NextForward]:
        """Yield the passes as they are chosen."""
        while self._choice.are_left:
            await_device()
            self._poll()
            chosen = self._choice.choose()
            if chosen is None:
                self._arrivals.wait(self._expected())
                continue
            replica, own, early = chosen
            item = own.microbatch * len(self._partners) + replica
            self._arrivals.take(PassKey(RecordKind.FORWARD, own.chunk, item))
            yield NextForward(replica, own, self._inputs.pop((replica, own), None), early)

    def take_credits(self, replica: int) -> None:
        """Wait for the credits that have not arrived."""
        while not self._choice.is_credited(replica):
            self._poll()
            self._arrivals.take()
            if not self._choice.is_credited(replica):
                self._arrivals.wait(f"a credit of rank {self._partners[replica]}")

    def _poll(self) -> None:
        """Take what has arrived: credits, and inputs as far as they are next in their chunks."""
        self._arrivals.begin_poll()
        for replica, partner in enumerate(self._partners):
            while not self._choice.is_credited(replica):
                number = self._arrivals.poll_number(partner)
                if number is None:
                    break
                ended = self._step.credited_pass(number, partner)
                self._choice.credit(replica, ended)
                self._arrivals.announce_credit(partner, PassKey(RecordKind.BACKWARD, ended.chunk, ended.microbatch))
        while any([self._poll_input(replica, own) for replica, own in self._choice.awaited()]):
            pass

    def _poll_input(self, replica: int, own: Pass) -> bool:
        """Take the input of a pass. Returns whether it has arrived."""
        found = self._arrivals.poll(self._step.input_message(own, replica))
        if found is None:
            return False
        self._inputs[replica, own] = found
        self._choice.receive(replica, own)
        return True

    def _expected(self) -> str:
        awaited = self._choice.awaited()[:4]
        inputs = [f"the input of microbatch {own.microbatch}, chunk {own.chunk}" for _, own in awaited]
        return ", or ".join([*inputs, *(f"a credit of rank {partner}" for partner in self._partners)])


def forward_order_of(step: ForwardRankStep) -> ForwardOrder:
    """Return the forward passes of a step, whose order is that of its `orders`."""
    return DynamicForwardOrder(step) if step.orders.are_dynamic else StaticForwardOrder(step)


def receive_input(channel: Channel, stage: Stage, step: int, item: int, chunk: int) -> torch.Tensor | None:
    """Wait for the input of a chunk; None on the first stage."""
    if stage.is_first(chunk):
        return None
    return channel.receive(*_input_message(channel, stage, step, item, chunk))


def _input_message(channel: Channel, stage: Stage, step: int, item: int, chunk: int) -> AwaitedMessage:
    key = MessageKey(MessageKind.ACTIVATION, step, item, stage.placement.stage(stage.rank, chunk))
    return AwaitedMessage(stage.previous, key, channel.activation, PassKey(RecordKind.FORWARD, chunk, item))
