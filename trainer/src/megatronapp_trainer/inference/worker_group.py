"""Ranks that generate together: rank 0 sends plans, all compute them, and the last stage's first rank reads logits."""

import dataclasses
import datetime
import time
from collections.abc import Callable
from typing import Any

import torch

from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.hooks.forward_observer import DISCARD
from megatronapp_trainer.hooks.prompt_reader import PromptReader
from megatronapp_trainer.inference.errors import EngineLostError
from megatronapp_trainer.inference.model.sampling import OutputLauncher, PendingOutputs, SampledOutput
from megatronapp_trainer.inference.model_runner import ModelRunner
from megatronapp_trainer.inference.perturbed_steps import TOPIC, AddRecipe, DropRecipe
from megatronapp_trainer.inference.rank_channel import ControlMessage, EngineCommand, RankChannel
from megatronapp_trainer.inference.step_plan import StepPlan
from megatronapp_trainer.parallel.agreement import is_peer_lost_error

_BEAT_S = 30.0
"""Seconds without a message after which followers receive a heartbeat, so that they do not give the gang up."""


class WorkerGroup:
    """Interface of this rank to the gang. Collective to make."""

    def __init__(self, runner: ModelRunner, *, timeout: datetime.timedelta = datetime.timedelta(minutes=10)) -> None:
        self.runner = runner
        self._layout = runner.layout
        self._channel = RankChannel(runner.layout, timeout=timeout)
        if self._channel.group is not None:
            runner.perturbation.compare_memory(self._channel.group)
        self._broadcast_at = time.monotonic()
        self._outputs = OutputLauncher(rows=runner.options.slots, graphs=runner.uses_graphs)
        self.idle_window = IdleWindow()
        """Window of the time in which this rank's thread waits."""
        self.prompt_reader: PromptReader | None = None
        """Reader of steps that read prompts; set on all ranks or on none."""
        self._token_R: torch.Tensor | None = None
        """Tokens that the last step has chosen, on the device."""
        self._handlers: dict[str, Callable[[Any], None]] = {
            "forget_graphs": lambda _payload: runner.forget_graphs(),
            DISCARD: lambda _payload: None,
            TOPIC: self._change_recipes,
        }

    @property
    def process_group(self) -> Any:  # noqa: ANN401 - of torch
        """Return the gloo group of all ranks; None for a single rank."""
        return self._channel.group

    def handle(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Set the handler of commands of a topic on this rank; each rank sets its own before rank 0 sends commands."""
        self._handlers[topic] = handler

    def command(self, topic: str, payload: Any = None) -> None:  # noqa: ANN401 - payload of the handlers
        """Let every rank, rank 0 too, handle a command of rank 0; at a step boundary, so not from within a step.

        The topic `forget_graphs`, which every gang has, lets CUDA graphs be captured again.
        """
        self._broadcast(EngineCommand(topic=topic, payload=payload))
        self._handlers[topic](payload)

    @property
    def schedules_ahead(self) -> bool:
        """Return true if a decode step may be launched before the answers of the step before it are read."""
        setting = self.runner.options.async_scheduling
        return self._layout.pipeline_size == 1 and (self.runner.keys_LZTGD.is_cuda if setting is None else setting)

    def execute(self, plan: StepPlan) -> tuple[SampledOutput, ...]:
        """Compute a plan of rank 0 with all ranks; return the answers to its outputs, in their order.

        Raises RuntimeError, as torch does, if a rank was lost.
        """
        return self.read(plan, self.launch(plan))

    def launch(self, plan: StepPlan) -> PendingOutputs | None:
        """Launch a plan of rank 0 on all ranks; `read` returns its answers. Raises as `execute`."""
        self._broadcast(plan)
        return self._compute(plan)

    def read(self, plan: StepPlan, launched: PendingOutputs | None) -> tuple[SampledOutput, ...]:
        """Return the answers of a plan that was launched, in the order of its outputs. Raises as `execute`."""
        if not plan.outputs:
            return ()
        if launched is not None:
            return launched.read(self.idle_window)
        with self.idle_window:
            readings: tuple[SampledOutput, ...] = self._channel.receive_reply()
        return readings

    def send_heartbeat(self) -> None:
        """Send a heartbeat from rank 0 to the others, if they have received nothing for 30 s."""
        if time.monotonic() - self._broadcast_at > _BEAT_S:
            self._broadcast(ControlMessage.BEAT)

    def close(self) -> None:
        """Let `follow` return on the other ranks; on rank 0."""
        self._broadcast(ControlMessage.CLOSE)
        self._let_go()

    def follow(self) -> None:
        """Compute what rank 0 plans until it closes; on every other rank.

        Raises:
            EngineLostError: a peer was lost.
        """
        try:
            while (message := self._receive()) is not ControlMessage.CLOSE:
                if isinstance(message, StepPlan):
                    self._follow_plan(message)
                elif isinstance(message, EngineCommand):
                    self._handlers[message.topic](message.payload)
            self._let_go()
        except RuntimeError as error:
            if is_peer_lost_error(error):
                raise EngineLostError(f"a rank of the gang was lost: {error}") from error
            raise

    def _change_recipes(self, command: AddRecipe | DropRecipe) -> None:
        if (observer := self.runner.observer) is not None:
            observer.settle()  # what is left of the last step reads the weights that it ran with
        self.runner.perturbation.change(command)

    def _let_go(self) -> None:
        """Delete the graphs: NCCL ends no communicator while a graph holds collectives of it."""
        self.runner.forget_graphs()

    def _receive(self) -> Any:  # noqa: ANN401 - the message of rank 0
        with self.idle_window:
            return self._channel.receive_broadcast()

    def _follow_plan(self, plan: StepPlan) -> None:
        launched = self._compute(plan)
        if launched is not None:
            readings = launched.read(self.idle_window)
            with self.idle_window:
                answer = tuple(map(_arrived, readings))
            self._channel.send_reply(answer)

    def _compute(self, plan: StepPlan) -> PendingOutputs | None:
        """Launch this rank's part; return its outputs on the leader alone, None elsewhere and where there are none."""
        reader = None if plan.decode else self.prompt_reader
        is_read = reader is not None and reader.begin(plan.segments)
        logits = self.runner.run(plan, self._token_R if plan.is_ahead else None)
        if reader is not None and is_read:
            reader.end()
        if logits is None or not plan.outputs:
            return None
        if self._layout.rank == self._channel.leader:
            launched = self._outputs.launch(logits, plan.outputs)
            self._token_R = launched.token_R
            return launched
        if plan.decode and self.schedules_ahead:  # tensor ranks have the same logits, and choose the same tokens
            self._token_R = self._outputs.tokens(logits, plan.outputs)
        return None

    def _broadcast(self, message: object) -> None:
        self._channel.broadcast(message)
        self._broadcast_at = time.monotonic()


def _arrived(reading: SampledOutput) -> SampledOutput:
    """Return the reading in a form that can be sent."""
    measures = reading.measures
    return reading if measures is None else dataclasses.replace(reading, measures=measures.get())
