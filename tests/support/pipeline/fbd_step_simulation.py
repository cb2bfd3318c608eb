"""Simulation of a training step of MegaFBD, message by message.

Sends never wait, but a message is delivered only into a free slot, in the order of its route, and a slot is free again
when its receiver does not need the message any more. Ranks that follow a policy of MegaDPP choose with its own code.
"""

import collections
import dataclasses
import random
from collections.abc import Iterator

from fbd_worlds import SHIPMENTS, WEIGHT_MESSAGES, layout_at

from megatronapp_common.topology import FbdWorld, RankRole
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.choice import BackwardChoice, ForwardChoice
from megatronapp_trainer.fbd.orders import MOST_PENDING_WEIGHTS, Pass, PassOrders, backward_order, forward_order
from megatronapp_trainer.fbd.stage import Stage, stage_of
from megatronapp_trainer.pipeline.planning.tasks import TaskKind

LOG_ENTRIES = 1024
Wait = tuple[int, MessageKey]
"""Sender and key of a message that a rank needs next."""
Waits = tuple[Wait, ...]
"""Messages of which the rank needs one."""


@dataclasses.dataclass
class Route:
    """Messages from one rank to another over one of their transports."""

    slots: int
    queued: collections.deque[MessageKey] = dataclasses.field(default_factory=collections.deque)
    delivered: set[MessageKey] = dataclasses.field(default_factory=set)
    used: int = 0
    late: float | None = None
    """Lateness of all its messages, drawn with the first one."""

    def lateness(self, delays: random.Random) -> float:
        """Return how late the next message is: as late as all others, or of each its own."""
        if self.late is None:
            self.late = delays.random()
        return self.late if self.late > 0.3 else delays.random()


class Network:
    """Routes between all ranks, and the messages that were sent over them."""

    def __init__(self, control_slots: int, *, has_slots_for_all: bool) -> None:
        self._control_slots = control_slots
        self._has_slots_for_all = has_slots_for_all
        """True if no message has to wait for a slot, as where its receiver may need it before those that have one."""
        self.routes: dict[tuple[int, int, str], Route] = {}
        self.sent: collections.Counter[tuple[int, int, MessageKind]] = collections.Counter()
        self.saved_slots: dict[tuple[int, int], int] = {}
        """Slots for shipments from a forward rank to a backward rank."""
        self.ended: collections.defaultdict[int, collections.deque[Pass]] = collections.defaultdict(collections.deque)
        """By backward rank, the passes that its credits on their way name."""

    def route(self, sender: int, receiver: int, kind: MessageKind) -> Route:
        if kind is MessageKind.COMMAND:
            name, slots = "log", LOG_ENTRIES
        elif kind is MessageKind.SAVED:
            name, slots = "saved", self.saved_slots[sender, receiver]
        else:
            name, slots = "control", self._control_slots
        return self.routes.setdefault((sender, receiver, name), Route(slots))

    def send(self, sender: int, receiver: int, key: MessageKey) -> None:
        route = self.route(sender, receiver, key.kind)
        route.queued.append(key)
        if self._has_slots_for_all and key.kind is not MessageKind.WEIGHTS:
            assert route.used + len(route.queued) <= route.slots, f"{key} of rank {sender} to {receiver} has no slot"
        self.sent[sender, receiver, key.kind] += 1

    def deliverable(self) -> list[Route]:
        return [route for route in self.routes.values() if route.queued and route.used < route.slots]

    def has_any(self, receiver: int, waits: Waits) -> bool:
        return any(self.has(receiver, wait) for wait in waits)

    def has(self, receiver: int, wait: Wait) -> bool:
        sender, key = wait
        return key in self.route(sender, receiver, key.kind).delivered

    def release(self, receiver: int, wait: Wait) -> None:
        sender, key = wait
        route = self.route(sender, receiver, key.kind)
        route.delivered.remove(key)
        route.used -= 1


@dataclasses.dataclass(frozen=True)
class RankStep:
    """A step on one rank: its place in the pipeline, and microbatches."""

    stage: Stage
    count: int
    orders: PassOrders


class ForwardProgram:
    """A forward rank in one step; it yields what it waits for."""

    def __init__(self, rank: int, world: FbdWorld, step: RankStep, network: Network) -> None:
        self.rank = rank
        self._orders = step.orders
        self._world = world
        self._stage = step.stage
        self._count = step.count
        self._network = network
        self._numbers: collections.Counter[int] = collections.Counter()
        partners = world.partners(rank)
        self._replicas = [partners] if world.merged else [(partner,) for partner in partners]

    def run(self) -> Iterator[Waits]:
        placement, rank = self._stage.placement, self._stage.rank
        for partner in self._world.partners(self.rank):
            yield from self._number(partner)
        for partner in self._replicas[0]:
            for part in range(WEIGHT_MESSAGES):
                yield from self._taken(partner, MessageKey(MessageKind.WEIGHTS, 0, part))
        order = forward_order(placement, self._count, rank)
        yield from self._as_ready() if self._orders.are_dynamic else self._in_order(order)
        for partner in self._world.partners(self.rank):
            while self._numbers[partner] < 1 + len(order):
                yield from self._number(partner)
            self._network.send(self.rank, partner, MessageKey(MessageKind.SUMMARY, 0))

    def _in_order(self, order: tuple[Pass, ...]) -> Iterator[Waits]:
        credits = [self._orders.places(self._count, self._stage.rank)] * len(self._replicas)
        for own in order:
            for index in range(len(self._replicas)):
                if not credits[index]:
                    yield from self._credit(index)
                    credits[index] += 1
                credits[index] -= 1
                if not self._stage.is_first(own.chunk):
                    yield from self._taken(*self._input(own, index))
                self._send(own, index)

    def _as_ready(self) -> Iterator[Waits]:
        """Poll credits and inputs, and run the pass of the policy, as `DynamicForwardOrder` does."""
        choice = ForwardChoice(self._orders, self._stage.rank, self._count, len(self._replicas))
        partners = [partner for (partner,) in self._replicas]
        ahead = [0] * len(partners)
        while choice.are_left:
            for index, partner in enumerate(partners):
                while self._network.has(self.rank, self._next_number(partner)):
                    self._network.release(self.rank, self._next_number(partner))
                    self._numbers[partner] += 1
                    choice.credit(index, self._network.ended[partner].popleft())
                    ahead[index] -= 1
            for index, own in choice.awaited():
                if self._network.has(self.rank, self._input(own, index)):
                    choice.receive(index, own)  # it keeps its slot until the pass has run
            chosen = choice.choose()
            if chosen is None:
                inputs = [self._input(own, index) for index, own in choice.awaited()]
                yield (*map(self._next_number, partners), *inputs)
                continue
            if not self._stage.is_first(chosen.own.chunk):
                self._network.release(self.rank, self._input(chosen.own, chosen.replica))
            ahead[chosen.replica] += 1
            assert ahead[chosen.replica] <= self._orders.places(self._count, self._stage.rank)
            self._send(chosen.own, chosen.replica)
            yield ()

    def _next_number(self, partner: int) -> Wait:
        return partner, MessageKey(MessageKind.COMMAND, 0, self._numbers[partner])

    def _input(self, own: Pass, index: int) -> Wait:
        stage = self._stage.placement.stage(self._stage.rank, own.chunk)
        item = own.microbatch * len(self._replicas) + index
        return self._stage.previous, MessageKey(MessageKind.ACTIVATION, 0, item, stage)

    def _credit(self, index: int) -> Iterator[Waits]:
        for partner in self._replicas[index]:
            yield from self._number(partner)

    def _send(self, own: Pass, index: int) -> None:
        """Run a pass: ship what it saves, and pass on its output."""
        microbatch, chunk = own
        stage = self._stage.placement.stage(self._stage.rank, chunk)
        item = microbatch * len(self._replicas) + index
        for partner in self._replicas[index]:
            for part in range(SHIPMENTS[chunk]):
                self._network.send(self.rank, partner, MessageKey(MessageKind.SAVED, 0, microbatch, chunk, part))
        if self._stage.is_last(chunk):
            for partner in self._replicas[index]:
                self._network.send(self.rank, partner, MessageKey(MessageKind.REPORT, 0, microbatch))
        else:
            self._network.send(self.rank, self._stage.following, MessageKey(MessageKind.ACTIVATION, 0, item, stage + 1))

    def _number(self, partner: int) -> Iterator[Waits]:
        yield from self._taken(*self._next_number(partner))
        self._numbers[partner] += 1

    def _taken(self, sender: int, key: MessageKey) -> Iterator[Waits]:
        yield ((sender, key),)
        self._network.release(self.rank, (sender, key))

    def fill_wait(self) -> bool:
        """Return whether the rank did something while it waits; forward ranks have nothing."""
        return False


class BackwardProgram:
    """A backward rank in one step; it yields what it waits for, and may run a weight pass while it waits."""

    def __init__(self, rank: int, world: FbdWorld, step: RankStep, network: Network, *, split: bool) -> None:
        self.rank = rank
        self._orders = step.orders
        self._stage = step.stage
        self._count = step.count
        self._network = network
        self._split = split
        self._numbers = 0
        (self._partner,) = world.partners(rank)
        self._sends_weights = world.merged or world.partners(self._partner)[0] == rank
        self._pending: collections.deque[Pass] = collections.deque()

    def run(self) -> Iterator[Waits]:
        self._append()
        for part in range(WEIGHT_MESSAGES if self._sends_weights else 0):
            self._network.send(self.rank, self._partner, MessageKey(MessageKind.WEIGHTS, 0, part))
        yield from self._as_ready() if self._orders.are_dynamic else self._in_order()
        yield ((self._partner, MessageKey(MessageKind.SUMMARY, 0)),)

    def _in_order(self) -> Iterator[Waits]:
        for own in backward_order(self._stage.placement, self._count, self._stage.rank):
            for wait in self._needed(own):
                yield (wait,)
            self._run(own)
            self._pending.append(own)
            while len(self._pending) > (MOST_PENDING_WEIGHTS if self._split else 0):
                self.fill_wait()
        while self.fill_wait():
            pass

    def _as_ready(self) -> Iterator[Waits]:
        """Poll the messages of passes, and run the pass of the policy, as `BackwardSchedule` does."""
        choice = BackwardChoice(self._orders, self._stage.rank, self._count)
        pending = 0
        while choice.are_left:
            lacking = []
            for own in choice.awaited():
                missing = [wait for wait in self._needed(own) if not self._network.has(self.rank, wait)]
                lacking += missing[:1]
                if not missing:
                    choice.receive(own)
            task = choice.choose()
            if task is None:
                yield tuple(lacking)
                continue
            own = Pass(task.microbatch, task.chunk)
            if task.kind is TaskKind.BACKWARD:
                self._run(own)
            if self._orders.split_weights:
                pending += 1 if task.kind is TaskKind.BACKWARD else -1
                assert pending <= MOST_PENDING_WEIGHTS + 1
            if task.kind is TaskKind.WEIGHT or not self._orders.split_weights:
                self._free(own)
            yield ()

    def _needed(self, own: Pass) -> list[Wait]:
        """Return the messages that a backward pass takes."""
        microbatch, chunk = own
        stage = self._stage.placement.stage(self._stage.rank, chunk)
        needed = [
            (self._partner, MessageKey(MessageKind.SAVED, 0, microbatch, chunk, part))
            for part in range(SHIPMENTS[chunk])
        ]
        if self._stage.is_last(chunk):
            return [*needed, (self._partner, MessageKey(MessageKind.REPORT, 0, microbatch))]
        return [*needed, (self._stage.following, MessageKey(MessageKind.GRADIENT, 0, microbatch, stage))]

    def _run(self, own: Pass) -> None:
        """Run a backward pass: it passes on the gradient of its input."""
        microbatch, chunk = own
        stage = self._stage.placement.stage(self._stage.rank, chunk)
        if self._stage.is_last(chunk):
            self._network.release(self.rank, (self._partner, MessageKey(MessageKind.REPORT, 0, microbatch)))
        if not self._stage.is_first(chunk):
            self._network.send(
                self.rank, self._stage.previous, MessageKey(MessageKind.GRADIENT, 0, microbatch, stage - 1)
            )

    def fill_wait(self) -> bool:
        """Run a weight pass if one is pending: its messages are free, and the forward rank gets a credit."""
        if not self._pending:
            return False
        self._free(self._pending.popleft())
        return True

    def _free(self, own: Pass) -> None:
        """Give a credit: the messages of a pass are not needed any more."""
        for wait in self._needed(own):
            if wait[1].kind is not MessageKind.REPORT:
                self._network.release(self.rank, wait)
        self._network.ended[self.rank].append(own)
        self._append()

    def _append(self) -> None:
        self._network.send(self.rank, self._partner, MessageKey(MessageKind.COMMAND, 0, self._numbers))
        self._numbers += 1


Program = ForwardProgram | BackwardProgram


def simulate(programs: list[Program], network: Network, delays: random.Random) -> None:
    """Run all programs to their ends; ranks and routes are late as `delays` says, some of them throughout."""
    running = [(program, program.run()) for program in programs]
    waits = {program.rank: next(steps, None) for program, steps in running}
    lateness = {program.rank: delays.random() for program in programs}
    steadiness = delays.choice((0.7, 0.95, 1.0))
    while any(wait is not None for wait in waits.values()):
        able: list[tuple[float, object]] = [(route.lateness(delays), route) for route in network.deliverable()]
        for program, steps in running:
            wait = waits[program.rank]
            if wait is not None and (not wait or network.has_any(program.rank, wait)):
                able.append((lateness[program.rank], (program, steps)))
        if not able:
            assert any(program.fill_wait() for program in programs), f"every rank waits: {waits}"
            continue
        _, chosen = min(able, key=lambda entry: entry[0]) if delays.random() < steadiness else delays.choice(able)
        if isinstance(chosen, Route):
            chosen.delivered.add(chosen.queued.popleft())
            chosen.used += 1
        else:
            program, steps = chosen  # type: ignore[misc]
            waits[program.rank] = next(steps, None)


def simulate_step(
    world: FbdWorld,
    chunks: int,
    count: int,
    delays: random.Random,
    *,
    split: bool,
    control_slots: int,
    schedule: str | None = None,
) -> Network:
    """Run a step of `count` microbatches on all ranks; returns what was sent. `schedule`: that of MegaDPP."""
    network = Network(control_slots, has_slots_for_all=schedule is not None)
    programs: list[Program] = []
    for rank in range(world.world_size):
        stage = stage_of(layout_at(world, rank, chunks))
        step = RankStep(stage, count, PassOrders(stage.placement, schedule))
        if world.role_of(rank) is RankRole.FORWARD:
            programs.append(ForwardProgram(rank, world, step, network))
            most = step.orders.places(count, stage.rank)
            for partner in world.partners(rank):
                network.saved_slots[rank, partner] = most * max(SHIPMENTS[:chunks])
        else:
            programs.append(BackwardProgram(rank, world, step, network, split=split))
    simulate(programs, network, delays)
    return network
