"""A forward rank: it runs what its backward ranks command, ships what autograd saves, and keeps nothing."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from megatronapp_common.names import ExitCode
from megatronapp_common.trace import NO_MICROBATCH, RecordKind
from megatronapp_trainer.checkpoint import random_states
from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.data.microbatches import (
    DataIterators,
    HostMicrobatch,
    MicrobatchSource,
    RepeatableBatches,
    StepFeed,
)
from megatronapp_trainer.errors import TransferError, TransferTimeoutError, WeightVersionError
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.commands import VERSIONS, Command, Order, Split
from megatronapp_trainer.fbd.channels.expected import TrafficManifest, expected_traffic, refuse_other_traffic
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.channels.summary import StepSummary, send_summary
from megatronapp_trainer.fbd.commanded_perturbation import CommandedPerturbation
from megatronapp_trainer.fbd.forward_order import ForwardRankStep, NextForward, forward_order_of, receive_input
from megatronapp_trainer.fbd.forward_passes import ForwardOutput, run_forward
from megatronapp_trainer.fbd.graph.shipments import ShipmentSender, shipped_pass
from megatronapp_trainer.fbd.orders import PassOrders, forward_order
from megatronapp_trainer.fbd.remote_texts import CommandedTexts
from megatronapp_trainer.fbd.ship_modes import ShipSwitch
from megatronapp_trainer.fbd.stage import Stage
from megatronapp_trainer.fbd.weights import receive_weight_parts, receive_weights
from megatronapp_trainer.hooks.boundary_control import BoundaryControl
from megatronapp_trainer.hooks.probe_texts import ProbeTexts
from megatronapp_trainer.hooks.step_observer import StepObserver
from megatronapp_trainer.hooks.training_capture import TrainingCapture
from megatronapp_trainer.hooks.transfer_observer import PassKey
from megatronapp_trainer.models.registry import model_family
from megatronapp_trainer.pipeline.executor import POLL_S
from megatronapp_trainer.pipeline.planning.tasks import Task
from megatronapp_trainer.pipeline.task_clocks import DeviceTaskClock, HostTaskClock, TaskClock
from megatronapp_trainer.pipeline.task_random import TaskRandom
from megatronapp_trainer.training.build import TrainingRun
from megatronapp_trainer.training.evaluate import untouched_training

MOST_LAUNCHED = 2
"""Passes that a device may have: one runs, and the next one follows at once."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Replica:
    """A model replica whose microbatches this rank runs forward."""

    partners: tuple[int, ...]
    """Backward ranks of the replica, which command and give credits: one, or a tensor group with a merged forward."""
    iterators: DataIterators
    batches: RepeatableBatches = dataclasses.field(init=False)
    """Microbatches of training."""
    states: dict[str, object]
    """Random states with which its next forward pass begins, or with `random` the next step."""
    versions: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Passes of the step by the version of the weights that they used."""
    first_states: dict[str, object] = dataclasses.field(default_factory=dict)
    """Random states with which the newest step began."""
    random: TaskRandom | None = None
    """Seeds each pass, so that masks do not depend on the order of passes; None without MegaDPP or dropout."""

    def __post_init__(self) -> None:
        self.batches = RepeatableBatches(self.iterators.train)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw random numbers of this replica inside the context."""
        random_states.restore(self.states)
        yield
        self.states = random_states.capture()


class ForwardRank:
    """Runs forward passes until its backward ranks end the training."""

    def __init__(
        self,
        run: TrainingRun,
        stage: Stage,
        channel: Channel,
        replicas: list[Replica],
        senders: dict[ShipMode, list[ShipmentSender]],
        *,
        orders: PassOrders,
        manifest: TrafficManifest,
        iteration: int,
        observer: StepObserver | None,
        stop_requested: Callable[[], bool],
        control: BoundaryControl | None = None,
        capture: TrainingCapture | None = None,
        probes: ProbeTexts | None = None,
        perturbation: CommandedPerturbation | None = None,
    ) -> None:
        """Take a run without optimizer, and by mode a sender of saved tensors for each of its chunks.

        `orders`: of its passes; `manifest`: of its channels; `control`: of the training, where it obeys orders.
        """
        self._run = run
        self._family = model_family(run.config)
        self._stage = stage
        self._channel = channel
        self._replicas = replicas
        self._all_senders = senders
        self._senders: list[ShipmentSender] = []
        """Senders of the step's mode."""
        self._switch = ShipSwitch(run.config, run.state.chunks)
        self._orders = orders
        self._manifest = manifest
        self._iteration = iteration
        self._observer = observer
        self._stop_requested = stop_requested
        self._control = control
        self._capture = capture
        self._perturbation = perturbation or CommandedPerturbation()
        self._probes = None if probes is None else CommandedTexts(probes, len(replicas))
        self._source: MicrobatchSource = self._family.batch_source(run.config, run.layout, run.device)
        self._clock: TaskClock = DeviceTaskClock() if run.device.is_cuda else HostTaskClock()
        self._step = 0
        self._order = Order(Command.END)
        """The last command."""
        self._version: int | None = None
        """Version of the weights; None before the first ones."""

    def close(self) -> None:
        """End captures and the records of the observer."""
        if self._capture is not None:
            self._capture.close()
        if self._observer is not None:
            self._observer.close()

    def serve(self) -> ExitCode:
        """Do what the backward ranks command, until they end the training; returns their exit code.

        Raises:
            PeerLostError: a rank is lost or takes too long.
            TransferError: backward ranks do not agree.
        """
        try:
            while (order := self._next_order()).command is not Command.END:
                if order.command is Command.BOUNDARY:
                    self._obey_orders()
                    continue
                if order.sends_weights:
                    self._receive_weights()
                self._refuse_other_weights()
                if not order.trains:
                    self._evaluate(order)
                    continue
                self._senders = self._all_senders[order.ship]
                self._switch.set(order.ship)
                if order.command is Command.REPEAT:
                    self._repeat_step(order.num_microbatches)
                else:
                    self._run_step(order.num_microbatches)
        except BaseException:
            self._channel.close(drain=False)  # so that ranks that wait for this one learn of the failure at once
            raise
        if self._control is not None:
            self._control.close()
        self._channel.close()
        return ExitCode(order.num_microbatches)

    def _obey_orders(self) -> None:
        """Obey orders with all ranks of the job; where the training ends for them, the next command says it."""
        if self._control is None:
            raise TransferError(
                f"command {self._step}: rank {self._channel.partners[0]} obeys orders, and this rank does not; give "
                "all ranks --training-control"
            )
        self._control.at_boundary(self._iteration)

    def _next_order(self) -> Order:
        self._step += 1
        self._channel.sent.clear()
        self._channel.received.clear()
        orders = [Order.unpack(self._channel.next_number(partner)) for partner in self._channel.partners]
        if len(set(orders)) > 1:
            raise TransferError(
                f"command {self._step}: backward ranks {list(self._channel.partners)} command {orders}; they must agree"
            )
        self._order = orders[0]
        if self._order.command is Command.CREDIT:
            microbatch, chunk = self._order.ended
            raise TransferError(
                f"command {self._step}: rank {self._channel.partners[0]} gives a credit for microbatch "
                f"{microbatch}, chunk {chunk}, after those of all passes of its step; "
                "it must give one for each backward pass"
            )
        return self._order

    def _receive_weights(self) -> None:
        chunks, partners = self._run.state.chunks, self._replicas[0].partners
        if len(partners) > 1:
            version = receive_weight_parts(self._channel, chunks, self._step)
        else:
            version = receive_weights(self._channel, partners[0], chunks, self._step)
        self._version = version % VERSIONS

    def _refuse_other_weights(self) -> None:
        """Raise WeightVersionError if the weights are not those of the command."""
        if self._version != self._order.version:
            raise WeightVersionError(
                f"command {self._step}: it is for the weights after {self._order.version} optimizer steps, and those "
                f"of rank {self._run.layout.global_rank} are of {self._version}, sent by rank "
                f"{self._replicas[0].partners[0]}"
            )

    def _run_step(self, num_microbatches: int) -> None:
        if self._observer is not None:
            self._observer.step_begin(self._iteration)
        self._perturbation.step_begin(self._iteration, 0)
        is_captured = self._capture is not None and self._capture.step_begin(self._iteration, self._perturbation.active)
        is_repeatable = self._capture is not None and bool(self._capture.every) and not is_captured
        for replica in self._replicas:
            replica.first_states = replica.states
            replica.batches.begin_step(stores=is_repeatable)
        self._train(num_microbatches, [replica.batches for replica in self._replicas])
        self._perturbation.passes_done()
        if self._capture is not None and is_captured:
            self._end_capture(self._capture)
        if self._observer is not None:
            self._observer.step_end(None)
        self._iteration += 1

    def _repeat_step(self, num_microbatches: int) -> None:
        """Run the passes of the newest step once more, captured. Raises TransferError on a rank without captures."""
        if self._capture is None:
            raise TransferError("this rank captures no steps; give all ranks --scope-capture-interval")
        for replica in self._replicas:
            replica.states = replica.first_states
        self._capture.step_again(self._iteration - 1, self._perturbation.newest)
        self._train(num_microbatches, [replica.batches.again() for replica in self._replicas])
        self._end_capture(self._capture)

    def _end_capture(self, capture: TrainingCapture) -> None:
        if self._observer is not None:
            self._observer.begin(RecordKind.CAPTURE, 0, NO_MICROBATCH)
        capture.step_computed()
        capture.step_ended(None)
        if self._observer is not None:
            self._observer.end(RecordKind.CAPTURE)

    def _train(self, num_microbatches: int, batches: Sequence[Iterator[HostMicrobatch]]) -> None:
        """Run the forward passes of a step. `batches`: microbatches of each replica."""
        self._clock.begin_step({})
        feeds = [StepFeed(self._source, own, num_microbatches, observer=self._observer) for own in batches]
        for replica in self._replicas:
            replica.versions.clear()
            if replica.random is not None:
                with replica.drawing():
                    replica.random.begin_step()
        partners = [replica.partners for replica in self._replicas]
        order = forward_order_of(
            ForwardRankStep(
                channel=self._channel,
                stage=self._stage,
                orders=self._orders,
                partners=partners,
                number=self._step,
                num_microbatches=num_microbatches,
            )
        )
        for own in order.passes(self._await_device):
            self._run_and_ship(own, feeds[own.replica])
            del own  # its input is in a slot, which the next wait must not hold
        seconds = self._forward_seconds(num_microbatches)
        self._refuse_other_sent(without={MessageKind.SUMMARY})  # before a wait for credits that a lost message delays
        for index, replica in enumerate(self._replicas):
            order.take_credits(index)
            self._send_summaries(replica, seconds)
        self._refuse_other_sent()
        self._refuse_other_received()

    def _refuse_other_sent(self, without: Collection[MessageKind] = ()) -> None:
        """Raise TransferError if other messages were sent than the command has."""
        expected = expected_traffic(self._manifest, self._order).sent
        refuse_other_traffic(self._channel.sent, expected, step=self._step, sent=True, without=without)

    def _refuse_other_received(self) -> None:
        """Raise TransferError if other messages were received than the command has."""
        expected = expected_traffic(self._manifest, self._order).received
        refuse_other_traffic(self._channel.received, expected, step=self._step, sent=False)

    def _forward_seconds(self, num_microbatches: int) -> float:
        """Return the mean of a microbatch; on a device wait for the last pass, after which it has nothing to do."""
        times = self._clock.times()
        assert times is not None
        return sum(time.seconds for time in times.tasks) / (num_microbatches * len(self._replicas))

    def _send_summaries(self, replica: Replica, forward_seconds: float) -> None:
        states = dict(replica.states)
        if self._run.config.fbd.fbd_forward_on_cpu:
            states = random_states.of_host(states)
        elif len(replica.partners) > 1:
            del states["tracker"]  # of a whole model: each rank of the tensor group has its own
        for partner in replica.partners:
            summary = StepSummary(
                counts=[(kind, *self._channel.sent.of(partner, kind)) for kind in MessageKind],
                versions=dict(replica.versions),
                states=states,
                stop_requested=self._stop_requested(),
                forward_seconds=forward_seconds,
            )
            send_summary(self._channel, partner, self._step, summary)

    def _run_and_ship(self, own: NextForward, feed: StepFeed) -> None:
        """Run a pass of a replica, ship what it saves, and pass on its output."""
        index, (microbatch, chunk), received, early = own
        replica = self._replicas[index]
        item = microbatch * len(self._replicas) + index
        if received is not None:
            received.requires_grad_()
        batch = feed.take(chunk, microbatch)
        sender = self._senders[chunk]
        if self._observer is not None:
            self._observer.begin(RecordKind.FORWARD, chunk, item, early=early)
        self._clock.begin(Task.forward(item, chunk))
        states: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if replica.random is None:
            states = replica.drawing()
        else:
            replica.random.seed(Task.forward(microbatch, chunk))
        with states, sender.shipping(replica.partners, self._step, microbatch):
            result = run_forward(
                self._family, self._run.state.chunks[chunk], batch, received, is_last_stage=self._stage.is_last(chunk)
            )
        self._clock.end()
        if self._observer is not None:
            self._observer.end(RecordKind.FORWARD)
        assert self._version is not None
        replica.versions[self._version] += 1
        self._pass_on(result, replica, item, chunk)

    def _evaluate(self, order: Order) -> None:
        if order.split is Split.PROBES:
            if self._probes is None:
                raise TransferError("this rank has no probe texts; give all ranks --scope-probe-texts")
            with self._probes.round(self._iteration, self._perturbation.newest) as iterators:
                self._run_evaluation(order, iterators)
            return
        splits = [
            replica.iterators.valid if order.split is Split.VALIDATION else replica.iterators.test
            for replica in self._replicas
        ]
        if any(split is None for split in splits):
            raise TransferError(f"there are no samples of {order.split.name.lower()} for this evaluation")
        self._run_evaluation(order, [iterator for iterator in splits if iterator is not None])

    def _run_evaluation(self, order: Order, iterators: list[Iterator[Any]]) -> None:
        feeds = [StepFeed(self._source, iterator, order.num_microbatches, observer=None) for iterator in iterators]
        with torch.no_grad(), untouched_training(self._run), self._channel.unobserved():
            for microbatch, chunk in forward_order(self._stage.placement, order.num_microbatches, self._stage.rank):
                for index, replica in enumerate(self._replicas):
                    item = microbatch * len(self._replicas) + index
                    result = run_forward(
                        self._family,
                        self._run.state.chunks[chunk],
                        feeds[index].take(chunk, microbatch),
                        receive_input(self._channel, self._stage, self._step, item, chunk),
                        is_last_stage=self._stage.is_last(chunk),
                    )
                    self._pass_on(result, replica, item, chunk)
        self._refuse_other_sent()
        self._refuse_other_received()

    def _pass_on(self, result: ForwardOutput, replica: Replica, item: int, chunk: int) -> None:
        if result.report is not None:
            microbatch = item // len(self._replicas)
            key = MessageKey(MessageKind.REPORT, self._step, microbatch)
            for partner in replica.partners:
                self._channel.send(partner, key, result.report, shipped_pass(microbatch, chunk))
            return
        stage = self._stage.placement.stage(self._stage.rank, chunk)
        key = MessageKey(MessageKind.ACTIVATION, self._step, item, stage + 1)
        _, target = self._stage.placement.holder(stage + 1)
        self._channel.send(self._stage.following, key, result.output, PassKey(RecordKind.FORWARD, target, item))

    def _await_device(self) -> None:
        """Wait while the device has as many passes as may be launched: each has memory from its launch.

        Raises TransferTimeoutError if it finishes none within the deadline, as where ranks of its tensor group are
        lost.
        """
        if self._clock.own_work().tasks < MOST_LAUNCHED:
            return
        deadline = time.monotonic() + 60 * self._run.config.parallel.distributed_timeout_minutes
        with contextlib.nullcontext() if self._observer is None else self._observer.transfers.waiting():
            while self._clock.own_work().tasks >= MOST_LAUNCHED:
                if time.monotonic() > deadline:
                    raise TransferTimeoutError(
                        f"step {self._step}: the device of rank {self._run.layout.global_rank} has finished no forward "
                        "pass within --distributed-timeout-minutes"
                    )
                time.sleep(POLL_S)
