"""Inputs of tasks that arrive late, and in another order than they did."""

import random
from collections.abc import Callable
from typing import Any

from megatronapp_trainer.pipeline.planning.tasks import Task


class LateInputs:
    """A transport whose inputs arrive in another order and later than they did, by a seeded choice."""

    def __init__(self, transport: Any, seed: int) -> None:
        self._transport = transport
        self._choice = random.Random(seed)
        self._withheld: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def poll(self) -> dict[Any, Any]:
        self._withheld |= self._transport.poll()
        on_time = [task for task in self._withheld if self._choice.random() < 0.3]
        return {task: self._withheld.pop(task) for task in on_time}

    def wait(self, limit_s: float | None = None) -> None:
        if not self._withheld:
            self._transport.wait(limit_s)


class SecondFirst:
    """A transport that gives the first chunk its second microbatch before its first one, where others send them."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._withheld: dict[Any, Any] = {}
        self._second_arrived = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def poll(self) -> dict[Any, Any]:
        first, second = Task.forward(0, 0), Task.forward(1, 0)
        inputs: dict[Any, Any] = self._withheld | self._transport.poll()
        self._withheld = {}
        if first in inputs and not self._second_arrived:
            self._withheld[first] = inputs.pop(first)
        self._second_arrived = second in inputs or (self._second_arrived and first not in inputs)
        return inputs

    def wait(self, limit_s: float | None = None) -> None:
        if not (self._withheld and self._second_arrived):
            self._transport.wait(limit_s)


def install(seed: int) -> None:
    """Make the inputs of this process's ranks late from the next schedule on."""
    wrap_transport(lambda transport: LateInputs(transport, seed))


def wrap_transport(wrapper: Callable[[Any], Any]) -> None:
    """Put the transport of each schedule of this process into a wrapper."""
    from megatronapp_trainer.pipeline import dynamic

    connect: Any = dynamic._connect
    dynamic._connect = lambda *parts: wrapper(connect(*parts))
