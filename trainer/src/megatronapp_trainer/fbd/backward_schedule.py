"""The schedule of backward ranks: each microbatch's backward pass, from tensors that a forward rank has shipped."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from megatronapp_common.names import ExitCode
from megatronapp_common.trace import RecordKind
from megatronapp_trainer.checkpoint import random_states
from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.errors import TransferError, WeightVersionError
from megatronapp_trainer.fbd.channels.arrivals import Arrivals, AwaitedMessage
from megatronapp_trainer.fbd.channels.channel import Channel
from megatronapp_trainer.fbd.channels.commands import VERSIONS, Command, Order
from megatronapp_trainer.fbd.channels.expected import TrafficManifest, expected_traffic, refuse_other_traffic
from megatronapp_trainer.fbd.channels.messages import MessageKey, MessageKind
from megatronapp_trainer.fbd.channels.summary import receive_summary
from megatronapp_trainer.fbd.choice import BackwardChoice
from megatronapp_trainer.fbd.graph.shipments import ShipmentReceiver, shipped_pass
from megatronapp_trainer.fbd.orders import MOST_PENDING_WEIGHTS, Pass, PassOrders, backward_order
from megatronapp_trainer.fbd.remote_data import split_of
from megatronapp_trainer.fbd.ship_modes import ShipSwitch
from megatronapp_trainer.fbd.stage import Stage
from megatronapp_trainer.fbd.tuning.ship_tuner import ShipTuner
from megatronapp_trainer.fbd.weights import send_weights
from megatronapp_trainer.hooks.step_observer import StepObserver
from megatronapp_trainer.hooks.transfer_observer import PassKey
from megatronapp_trainer.parallel.groups import schedule_groups
from megatronapp_trainer.pipeline.megatron_schedules import connect_gradients
from megatronapp_trainer.pipeline.planning.tasks import Task, TaskKind
from megatronapp_trainer.pipeline.schedule import ScheduleContext
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec
from megatronapp_trainer.pipeline.weight_gradients import WeightGradientStore

_REPORT = TensorSpec((2,), torch.float32)


class _PassInputs(NamedTuple):
    """Messages that a backward pass needs, in the order in which they are taken."""

    shipments: list[AwaitedMessage]
    output: AwaitedMessage
    """Message with the gradient of the chunk's output, or on the last stage with the loss."""

    @property
    def targets(self) -> list[PassKey]:
        """Return the passes that the messages are of, for traces."""
        return [message.target for message in (*self.shipments, self.output) if message.target is not None]


class BackwardSchedule:
    """Commands the forward rank, and runs backward what it ships; gradients and optimizer are on this side alone."""

    def __init__(
        self,
        context: ScheduleContext,
        stage: Stage,
        channel: Channel,
        receivers: dict[ShipMode, list[ShipmentReceiver]],
        *,
        orders: PassOrders,
        stores: list[WeightGradientStore],
        tuner: ShipTuner,
        manifest: TrafficManifest,
        weight_version: Callable[[], int],
        request_stop: Callable[[], None],
    ) -> None:
        """Take what the steps of a run need.

        Args:
            context: of the run.
            stage: place of this rank.
            channel: to the forward rank and to neighbours, connected.
            receivers: of saved tensors, by mode one for each chunk.
            orders: of the passes.
            stores: of the chunks, from `install_split_backward`, which the graphs of the receivers use.
            tuner: gives the mode of each step.
            manifest: of this rank's channels; it has the traffic of weights unless another backward rank of the forward
                rank has the same ones and sends them.
            weight_version: returns the optimizer steps done.
            request_stop: called after a step in which the forward rank was asked to stop.
        """
        self._chunks = context.chunks
        self._observer = context.observer
        self._core_config = context.core_config
        self._optimizer = context.optimizer
        self._groups = schedule_groups()
        connect_gradients(context)
        self._orders = orders
        self._stores = stores
        self._stage = stage
        # Weight gradients communicate under sequence parallelism, and when they fill a wait depends on the rank: the
        # ranks of a tensor group would run them in different orders.
        may_split = stage.placement.ranks > 1 and context.layout.tensor_size == 1
        self._split = may_split and orders.split_weights
        self._channel = channel
        self._forward_rank = channel.partners[0]
        self._receivers = receivers
        self._tuner = tuner
        self._mode = context.config.ship_modes[0]
        self._switch = ShipSwitch(context.config, context.chunks)
        self._manifest = manifest
        self._weight_version = weight_version
        self._sent_version: int | None = None
        self._request_stop = request_stop
        self._step = 0
        self._order = Order(Command.END)
        """The last command."""
        self._pending_weights: collections.deque[Pass] = collections.deque()
        self._reports: dict[int, torch.Tensor] = {}
        self._scale = torch.ones((), device=next(context.chunks[0].parameters()).device)

    def train(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run the backward passes of all microbatches and reduce the gradients.

        Raises:
            PeerLostError: another rank is lost or takes too long.
            TransferError: a message is missing, or there is one too many.
        """
        with self._failing_at_once():
            self._mode = self._tuner.begin_step(num_microbatches)
            self._switch.set(self._mode)  # for what backward passes recompute
            command = Command.REPEAT if feed.is_repeated else Command.TRAIN
            self._command(Order(command, num_microbatches, ship=self._mode))
            for store in self._stores:
                store.begin_step(num_microbatches)
            if self._orders.are_dynamic:
                self._run_as_ready(num_microbatches)
            else:
                self._run_in_order(num_microbatches)
            forward_seconds = self._end_of_forward()
            copies = self._channel.received.copies(MessageKind.SAVED)
            if not feed.is_captured:
                self._tuner.end_step(num_microbatches, forward_seconds=forward_seconds, copies=copies)
        return self._finish()

    def evaluate(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Let the forward ranks evaluate; returns the reports of the loss by microbatch on the last stage."""
        with self._failing_at_once(), self._channel.unobserved():
            self._command(Order(Command.EVALUATE, num_microbatches, split_of(feed.iterator)))
            reports = []
            if self._stage.is_last(len(self._chunks) - 1):
                reports = [
                    self._await(
                        _report_message(self._forward_rank, self._step, microbatch, len(self._chunks) - 1)
                    ).clone()
                    for microbatch in range(num_microbatches)
                ]
            self._refuse_other_traffic()
            return reports

    @contextlib.contextmanager
    def _failing_at_once(self) -> Iterator[None]:
        """End the connections after a failure, so that ranks that wait for this one learn of it at once."""
        try:
            yield
        except BaseException:
            self._channel.close(drain=False)
            raise

    def close(self, code: ExitCode = ExitCode.OK) -> None:
        """End the forward rank, with the same exit code, and the connections."""
        self._channel.append(Order(Command.END, code).pack())
        self._channel.close()

    def announce_boundary(self) -> None:
        """Call the forward rank to a step boundary, where all ranks obey orders. It needs no new weights for that."""
        with self._failing_at_once():
            self._step += 1
            self._channel.append(Order(Command.BOUNDARY).pack())

    def resend_weights(self) -> None:
        """Send the weights with the next command, as they have changed without a step of the optimizer."""
        self._sent_version = None

    def _command(self, order: Order) -> None:
        """Command the forward rank, and start to send it the weights if the optimizer has changed them.

        No rank waits for their delivery here: the forward rank waits for all of them before its first pass.
        """
        self._step += 1
        version = self._weight_version() % VERSIONS
        self._order = order._replace(version=version, sends_weights=version != self._sent_version)
        self._channel.sent.clear()
        self._channel.received.clear()
        self._channel.append(self._order.pack())
        if self._order.sends_weights and self._manifest.weights:
            send_weights(self._channel, self._chunks, self._step, version)
        self._sent_version = version

    def _run_in_order(self, num_microbatches: int) -> None:
        """Run the static order, and compute weight gradients while the next pass has no input."""
        for own in backward_order(self._stage.placement, num_microbatches, self._stage.rank):
            inputs = self._inputs_of(own)
            for message in inputs.shipments:
                self._receivers[self._mode][own.chunk].take(self._await(message))
            self._run_backward(own, self._gradient(own, self._await(inputs.output), num_microbatches))
            if not self._split:
                continue
            self._pending_weights.append(own)
            while len(self._pending_weights) > MOST_PENDING_WEIGHTS:
                self._run_weight(self._pending_weights.popleft())
        while self._pending_weights:
            self._run_weight(self._pending_weights.popleft())

    def _run_as_ready(self, num_microbatches: int) -> None:
        """Run the passes that the policy names, as their inputs arrive."""
        choice = BackwardChoice(self._orders, self._stage.rank, num_microbatches)
        arrivals = Arrivals(self._channel, self._step)
        inputs: dict[Pass, _PassInputs] = {}
        outputs: dict[Pass, torch.Tensor] = {}
        while choice.are_left:
            arrivals.begin_poll()
            for own in choice.awaited():
                if own not in inputs:
                    inputs[own] = self._inputs_of(own)
                output = self._poll(own, arrivals, inputs[own])
                if output is not None:
                    outputs[own] = output
                    choice.receive(own)
            task = choice.choose()
            if task is None:
                passes = [f"what microbatch {own.microbatch}, chunk {own.chunk} needs" for own in choice.awaited()]
                arrivals.wait(", or ".join(passes))
                continue
            own = Pass(task.microbatch, task.chunk)
            if task.kind is TaskKind.WEIGHT:
                self._run_weight(own)
                continue
            gradient = self._gradient(own, outputs.pop(own), num_microbatches)
            arrivals.take(*inputs.pop(own).targets)
            self._run_backward(own, gradient, early=choice.early)
            del gradient  # it is in a slot, which the next wait must not hold

    def _poll(self, own: Pass, arrivals: Arrivals, inputs: _PassInputs) -> torch.Tensor | None:
        """Take what has arrived for a pass; returns the last of its messages, which is no shipment."""
        receiver = self._receivers[self._mode][own.chunk]
        while receiver.taken < len(inputs.shipments):
            found = arrivals.poll(inputs.shipments[receiver.taken])
            if found is None:
                return None
            receiver.take(found)
        return arrivals.poll(inputs.output)

    def _run_backward(self, own: Pass, gradient: torch.Tensor, *, early: bool = False) -> None:
        """Run the backward pass of a microbatch through a chunk, and pass on the gradient of its input."""
        microbatch, chunk = own
        with (
            _span(self._observer, RecordKind.BACKWARD, own, early=early),
            self._tuner.timing(Task.backward(microbatch, chunk)),
            self._stores[chunk].backward(microbatch, split=self._split),
        ):
            input_gradient = self._receivers[self._mode][chunk].backward(gradient)
        if input_gradient is not None:
            stage = self._stage.placement.stage(self._stage.rank, chunk)
            key = MessageKey(MessageKind.GRADIENT, self._step, microbatch, stage - 1)
            _, target = self._stage.placement.holder(stage - 1)
            target_pass = PassKey(RecordKind.BACKWARD, target, microbatch)
            self._channel.send(self._stage.previous, key, input_gradient, target_pass)
        if not self._split:
            self._credit(own)

    def _credit(self, ended: Pass) -> None:
        """Let the forward rank run one pass more, as the memory of this one is free."""
        target = PassKey(RecordKind.BACKWARD, ended.chunk, ended.microbatch)
        self._channel.append(Order.credit(*ended).pack(), target)

    def _inputs_of(self, own: Pass) -> _PassInputs:
        """Return the messages that a backward pass needs."""
        microbatch, chunk = own
        receiver = self._receivers[self._mode][chunk]
        shipments = [
            AwaitedMessage(self._forward_rank, *message) for message in receiver.messages(self._step, microbatch)
        ]
        if self._stage.is_last(chunk):
            return _PassInputs(
                shipments, _report_message(self._forward_rank, self._step, microbatch, len(self._chunks) - 1)
            )
        stage = self._stage.placement.stage(self._stage.rank, chunk)
        key = MessageKey(MessageKind.GRADIENT, self._step, microbatch, stage)
        target = PassKey(RecordKind.BACKWARD, chunk, microbatch)
        return _PassInputs(shipments, AwaitedMessage(self._stage.following, key, self._channel.activation, target))

    def _gradient(self, own: Pass, output: torch.Tensor, num_microbatches: int) -> torch.Tensor:
        """Return the gradient of a chunk's output: `output` of the next stage, or that of the sum of the losses.

        The latter is computed as autograd does it from megatron-core's loss, in the same order: the sum divided by the
        tokens, then by the microbatches, then scaled. `output` is the report of the loss then.
        """
        if not self._stage.is_last(own.chunk):
            return output
        report = self._reports[own.microbatch] = output.clone()
        gradient: torch.Tensor = self._optimizer.scale_loss(self._scale).reshape(())
        if self._core_config.calculate_per_token_loss:
            return gradient
        return gradient / num_microbatches / torch.clamp(report[1].to(torch.int), min=1)

    def _await(self, message: AwaitedMessage) -> torch.Tensor:
        """Wait for a message, and compute weight gradients meanwhile."""
        while self._pending_weights:
            found = self._channel.poll(*message)
            if found is not None:
                return found
            self._run_weight(self._pending_weights.popleft())
        return self._channel.receive(*message)

    def _run_weight(self, weight_pass: Pass) -> None:
        timing = self._tuner.timing(Task.weight(weight_pass.microbatch, weight_pass.chunk))
        with _span(self._observer, RecordKind.WEIGHT, weight_pass), timing:
            self._stores[weight_pass.chunk].run(weight_pass.microbatch)
        self._credit(weight_pass)

    def _end_of_forward(self) -> float:
        """Compare messages and weights with those of the step, and take over the forward rank's random states.

        The forward rank has answered, so that no weight is on its way any more when the optimizer changes it. Returns
        the length of its passes of a microbatch.
        """
        summary = receive_summary(self._channel, self._forward_rank, self._step)
        due = {self._order.version: self._order.num_microbatches * len(self._chunks)}
        if summary.versions != due:
            raise WeightVersionError(
                f"command {self._step}: by version of the weights, rank {self._forward_rank} has run forward passes "
                f"{summary.versions}, and the step has {due}"
            )
        for kind, messages, size in summary.counts:
            here = self._channel.received.of(self._forward_rank, kind)
            if kind is not MessageKind.SUMMARY and here != (messages, size):
                raise TransferError(
                    f"step {self._step}: rank {self._forward_rank} has sent {messages} messages of {kind.name.lower()} "
                    f"with {size} bytes, and {here[0]} with {here[1]} have arrived"
                )
        self._refuse_other_traffic()
        random_states.restore(random_states.capture() | summary.states)
        if summary.stop_requested:
            self._request_stop()
        return summary.forward_seconds

    def _refuse_other_traffic(self) -> None:
        """Raise TransferError if there were other messages since the command than it has."""
        channel, expected = self._channel, expected_traffic(self._manifest, self._order)
        refuse_other_traffic(channel.sent, expected.sent, step=self._step, sent=True)
        refuse_other_traffic(channel.received, expected.received, step=self._step, sent=False)
        channel.refuse_unread(self._step)

    def _finish(self) -> list[torch.Tensor]:
        """Reduce the gradients. Returns the reports by microbatch, on the last stage."""
        for store in self._stores:
            store.finish_step()
        reports = [self._reports[microbatch] for microbatch in sorted(self._reports)]
        self._reports.clear()
        tokens: Any = None
        if self._core_config.calculate_per_token_loss:
            tokens = torch.zeros([], dtype=torch.int, device=self._scale.device)
            for report in reports:
                tokens += report[1].to(torch.int)
        self._core_config.finalize_model_grads_func(self._chunks, tokens, pg_collection=self._groups)
        return reports


@contextlib.contextmanager
def _span(observer: StepObserver | None, kind: RecordKind, own: Pass, *, early: bool = False) -> Iterator[None]:
    """Announce a pass to the observer; `early`: before its turn in the static order."""
    if observer is not None:
        observer.begin(kind, own.chunk, own.microbatch, early=early)
    yield
    if observer is not None:
        observer.end(kind)


def _report_message(forward_rank: int, step: int, microbatch: int, last_chunk: int) -> AwaitedMessage:
    key = MessageKey(MessageKind.REPORT, step, microbatch)
    return AwaitedMessage(forward_rank, key, _REPORT, shipped_pass(microbatch, last_chunk))
