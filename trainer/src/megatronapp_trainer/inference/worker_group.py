"""The ranks that generate together: rank 0 tells plans, all compute them, and the last stage's first rank reads."""

import dataclasses
import datetime
import time
from collections.abc import Callable
from typing import Any

from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.inference.errors import EngineLostError
from megatronapp_trainer.inference.model.sampling import SampledOutput, read
from megatronapp_trainer.inference.model.token_statistics import StatisticsLauncher
from megatronapp_trainer.inference.model_runner import ModelRunner
from megatronapp_trainer.inference.rank_channel import ControlMessage, EngineCommand, RankChannel
from megatronapp_trainer.inference.step_plan import StepPlan
from megatronapp_trainer.parallel.agreement import is_peer_lost_error

_BEAT_S = 30.0
"""Without a message for as long, followers hear that the gang lives, so that they do not give it up."""


class WorkerGroup:
    """This rank's end of the gang. Collective to make."""

    def __init__(self, stage: ModelRunner, *, timeout: datetime.timedelta = datetime.timedelta(minutes=10)) -> None:
        self.stage = stage
        self._layout = stage.layout
        self._channel = RankChannel(stage.layout, timeout=timeout)
        self._broadcast_at = time.monotonic()
        self._measurer = StatisticsLauncher(rows=stage.options.slots, graphs=stage.uses_graphs)
        self.idle_window = IdleWindow()
        """When this rank's thread waits."""
        self._handlers: dict[str, Callable[[Any], None]] = {"forget_graphs": lambda _payload: stage.forget_graphs()}

    def handle(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Say what this rank does at a command of this topic; each rank says so for itself, before rank 0 commands."""
        self._handlers[topic] = handler

    def command(self, topic: str, payload: Any = None) -> None:  # noqa: ANN401 - whatever the handlers take
        """Rank 0: let every rank, this one too, handle a command; at a step border, so not from within a step.

        The topic `forget_graphs`, which every gang has, lets CUDA graphs be captured anew.
        """
        self._broadcast(EngineCommand(topic=topic, payload=payload))
        self._handlers[topic](payload)

    def execute(self, plan: StepPlan) -> tuple[SampledOutput, ...]:
        """Rank 0: compute a plan with all ranks; the answers to its outputs, in their order.

        Raises RuntimeError, as torch does, where a rank was lost.
        """
        self._broadcast(plan)
        mine = self._compute(plan)
        if not plan.outputs:
            return ()
        if mine is not None:
            return mine
        with self.idle_window:
            readings: tuple[SampledOutput, ...] = self._channel.receive_reply()
        return readings

    def send_heartbeat(self) -> None:
        """Rank 0: tell the others that the gang lives, where they have heard nothing for 30 s."""
        if time.monotonic() - self._broadcast_at > _BEAT_S:
            self._broadcast(ControlMessage.BEAT)

    def close(self) -> None:
        """Rank 0: let the others' `follow` return."""
        self._broadcast(ControlMessage.CLOSE)
        self._let_go()

    def follow(self) -> None:
        """Every rank but 0: compute what rank 0 plans until it closes.

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

    def _let_go(self) -> None:
        """NCCL ends no communicator as long as there is a graph that holds collectives of it."""
        self.stage.forget_graphs()

    def _receive(self) -> Any:  # noqa: ANN401 - whatever rank 0 told
        with self.idle_window:
            return self._channel.receive_broadcast()

    def _follow_plan(self, plan: StepPlan) -> None:
        readings = self._compute(plan)
        if readings:
            with self.idle_window:
                answer = tuple(map(_arrived, readings))
            self._channel.send_reply(answer)

    def _compute(self, plan: StepPlan) -> tuple[SampledOutput, ...] | None:
        """This rank's share; readings on the leader alone, None elsewhere."""
        logits = self.stage.run(plan)
        if logits is None or self._layout.rank != self._channel.leader:
            return None
        return read(logits, plan.outputs, self._measurer, self.idle_window) if plan.outputs else ()

    def _broadcast(self, message: object) -> None:
        self._channel.broadcast(message)
        self._broadcast_at = time.monotonic()


def _arrived(reading: SampledOutput) -> SampledOutput:
    """As it can be sent."""
    measures = reading.measures
    return reading if measures is None else dataclasses.replace(reading, measures=measures.get())
