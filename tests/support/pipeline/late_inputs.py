"""Inputs of tasks that arrive late, and in another order than they did."""

import random
from typing import Any


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

    def wait(self) -> None:
        if not self._withheld:
            self._transport.wait()


def install(seed: int) -> None:
    """Make the inputs of this process's ranks late from the next schedule on."""
    from megatronapp_trainer.pipeline import dynamic

    connect: Any = dynamic._connect
    dynamic._connect = lambda *parts: LateInputs(connect(*parts), seed)  # type: ignore[assignment]
