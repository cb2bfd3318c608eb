"""Simulation of a training step of MegaFBD, message by message.

Sends never wait, but a message is delivered only into a free slot, in the order of its route, and a slot is free again
when its receiver does not need the message any more.
"""

import collections
import dataclasses
import random
from collections.abc import Iterator

from fbd_worlds import SHIPMENTS, WEIGHT_MESSAGES, layout_at

from megatronapp_common.topology import FbdWorld, RankRole
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.orders import MOST_PENDING_WEIGHTS, backward_order, forward_order, places
from megatronapp_trainer.fbd.stage import Stage, stage_of

LOG_ENTRIES = 1024
Wait = tuple[int, MessageKey]
"""Sender and key of a message that a rank needs next."""


@dataclasses.dataclass
class Route:
    """Messages from one rank to another over one of their transports."""

    slots: int
    queued: collections.deque[MessageKey] = dataclasses.field(default_factory=collections.deque)
    delivered: set[MessageKey] = dataclasses.field(default_factory=set)
    used: int = 0


class Network:
    """Routes between all ranks, and the messages that were sent over them."""

    def __init__(self, control_slots: int) -> None:
        self._control_slots = control_slots
        self.routes: dict[tuple[int, int, str], Route] = {}
        self.sent: collections.Counter[tuple[int, int, MessageKind]] = collections.Counter()
        self.saved_slots: dict[tuple[int, int], int] = {}
        """Slots for shipments from a forward rank to a backward rank."""

    def route(self, sender: int, receiver: int, kind: MessageKind) -> Route:
        if kind is MessageKind.COMMAND:
            name, slots = "log", LOG_ENTRIES
        elif kind is MessageKind.SAVED:
            name, slots = "saved", self.saved_slots[sender, receiver]
        else:
            name, slots = "control", self._control_slots
        return self.routes.setdefault((sender, receiver, name), Route(slots))

    def send(self, sender: int, receiver: int, key: MessageKey) -> None:
        self.route(sender, receiver, key.kind).queued.append(key)
        self.sent[sender, receiver, key.kind] += 1

    def deliverable(self) -> list[Route]:
        return [route for route in self.routes.values() if route.queued and route.used < route.slots]

    def has(self, receiver: int, wait: Wait) -> bool:
        sender, key = wait
        return key in self.route(sender, receiver, key.kind).delivered

    def release(self, receiver: int, wait: Wait) -> None:
        sender, key = wait
        route = self.route(sender, receiver, key.kind)
        route.delivered.remove(key)
        route.used -= 1


class ForwardProgram:
    """A forward rank in one step; it yields what it waits for."""

    def __init__(self, rank: int, world: FbdWorld, stage: Stage, count: int, network: Network) -> None:
        self.rank = rank
        self._world = world
        self._stage = stage
        self._count = count
        self._network = network
        self._numbers: collections.Counter[int] = collections.Counter()
        partners = world.partners(rank)
        self._replicas = [partners] if world.merged else [(partner,) for partner in partners]

    def run(self) -> Iterator[Wait]:
        placement, rank = self._stage.placement, self._stage.rank
        for partner in self._world.partners(self.rank):
            yield from self._number(partner)
        for partner in self._replicas[0]:
            for part in range(WEIGHT_MESSAGES):
                yield from self._taken(partner, MessageKey(MessageKind.WEIGHTS, 0, part))
        credits = [places(placement, self._count, rank)] * len(self._replicas)
        order = forward_order(placement, self._count, rank)
        for microbatch, chunk in order:
            for index in range(len(self._replicas)):
                if not credits[index]:
                    yield from self._credit(index)
                    credits[index] += 1
                credits[index] -= 1
                yield from self._pass(microbatch, chunk, index)
        for partner in self._world.partners(self.rank):
            while self._numbers[partner] < 1 + len(order):
                yield from self._number(partner)
            self._network.send(self.rank, partner, MessageKey(MessageKind.SUMMARY, 0))

    def _credit(self, index: int) -> Iterator[Wait]:
        for partner in self._replicas[index]:
            yield from self._number(partner)

    def _pass(self, microbatch: int, chunk: int, index: int) -> Iterator[Wait]:
        stage = self._stage.placement.stage(self._stage.rank, chunk)
        item = microbatch * len(self._replicas) + index
        if not self._stage.is_first(chunk):
            yield from self._taken(self._stage.previous, MessageKey(MessageKind.ACTIVATION, 0, item, stage))
        for partner in self._replicas[index]:
            for part in range(SHIPMENTS[chunk]):
                self._network.send(self.rank, partner, MessageKey(MessageKind.SAVED, 0, microbatch, chunk, part))
        if self._stage.is_last(chunk):
            for partner in self._replicas[index]:
                self._network.send(self.rank, partner, MessageKey(MessageKind.REPORT, 0, microbatch))
        else:
            self._network.send(self.rank, self._stage.following, MessageKey(MessageKind.ACTIVATION, 0, item, stage + 1))

    def _number(self, partner: int) -> Iterator[Wait]:
        yield from self._taken(partner, MessageKey(MessageKind.COMMAND, 0, self._numbers[partner]))
        self._numbers[partner] += 1

    def _taken(self, sender: int, key: MessageKey) -> Iterator[Wait]:
        yield sender, key
        self._network.release(self.rank, (sender, key))

    def fill_wait(self) -> bool:
        """Return whether the rank did something while it waits; forward ranks have nothing."""
        return False


class BackwardProgram:
    """A backward rank in one step; it yields what it waits for, and may run a weight pass while it waits."""

    def __init__(self, rank: int, world: FbdWorld, stage: Stage, count: int, network: Network, *, split: bool) -> None:
        self.rank = rank
        self._stage = stage
        self._count = count
        self._network = network
        self._split = split
        self._numbers = 0
        (self._partner,) = world.partners(rank)
        self._sends_weights = world.merged or world.partners(self._partner)[0] == rank
        self._pending: collections.deque[list[Wait]] = collections.deque()

    def run(self) -> Iterator[Wait]:
        self._append()
        for part in range(WEIGHT_MESSAGES if self._sends_weights else 0):
            self._network.send(self.rank, self._partner, MessageKey(MessageKind.WEIGHTS, 0, part))
        for microbatch, chunk in backward_order(self._stage.placement, self._count, self._stage.rank):
            yield from self._pass(microbatch, chunk)
        while self.fill_wait():
            pass
        yield self._partner, MessageKey(MessageKind.SUMMARY, 0)

    def _pass(self, microbatch: int, chunk: int) -> Iterator[Wait]:
        stage = self._stage.placement.stage(self._stage.rank, chunk)
        needed: list[Wait] = []
        for part in range(SHIPMENTS[chunk]):
            needed.append((self._partner, MessageKey(MessageKind.SAVED, 0, microbatch, chunk, part)))
            yield needed[-1]
        if self._stage.is_last(chunk):
            report = (self._partner, MessageKey(MessageKind.REPORT, 0, microbatch))
            yield report
            self._network.release(self.rank, report)
        else:
            needed.append((self._stage.following, MessageKey(MessageKind.GRADIENT, 0, microbatch, stage)))
            yield needed[-1]
        if not self._stage.is_first(chunk):
            self._network.send(
                self.rank, self._stage.previous, MessageKey(MessageKind.GRADIENT, 0, microbatch, stage - 1)
            )
        self._pending.append(needed)
        while len(self._pending) > (MOST_PENDING_WEIGHTS if self._split else 0):
            self.fill_wait()

    def fill_wait(self) -> bool:
        """Run a weight pass if one is pending: its messages are free, and the forward rank gets a credit."""
        if not self._pending:
            return False
        for wait in self._pending.popleft():
            self._network.release(self.rank, wait)
        self._append()
        return True

    def _append(self) -> None:
        self._network.send(self.rank, self._partner, MessageKey(MessageKind.COMMAND, 0, self._numbers))
        self._numbers += 1


Program = ForwardProgram | BackwardProgram


def simulate(programs: list[Program], network: Network, delays: random.Random) -> None:
    """Run all programs to their ends; ranks and routes are late as `delays` says."""
    running = [(program, program.run()) for program in programs]
    waits = {program.rank: next(steps, None) for program, steps in running}
    lateness = {program.rank: delays.random() for program in programs}
    while any(waits.values()):
        able: list[tuple[float, object]] = [(delays.random(), route) for route in network.deliverable()]
        for program, steps in running:
            wait = waits[program.rank]
            if wait is not None and network.has(program.rank, wait):
                able.append((lateness[program.rank], (program, steps)))
        if not able:
            assert any(program.fill_wait() for program in programs), f"every rank waits: {waits}"
            continue
        _, chosen = min(able, key=lambda entry: entry[0]) if delays.random() < 0.7 else delays.choice(able)
        if isinstance(chosen, Route):
            chosen.delivered.add(chosen.queued.popleft())
            chosen.used += 1
        else:
            program, steps = chosen  # type: ignore[misc]
            waits[program.rank] = next(steps, None)


def simulate_step(
    world: FbdWorld, chunks: int, count: int, delays: random.Random, *, split: bool, control_slots: int
) -> Network:
    """Run a step of `count` microbatches on all ranks; returns what was sent."""
    network, programs = Network(control_slots), list[Program]()
    for rank in range(world.world_size):
        stage = stage_of(layout_at(world, rank, chunks))
        if world.role_of(rank) is RankRole.FORWARD:
            programs.append(ForwardProgram(rank, world, stage, count, network))
            most = places(stage.placement, count, stage.rank)
            for partner in world.partners(rank):
                network.saved_slots[rank, partner] = most * max(SHIPMENTS[:chunks])
        else:
            programs.append(BackwardProgram(rank, world, stage, count, network, split=split))
    simulate(programs, network, delays)
    return network
