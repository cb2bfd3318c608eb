"""Copies between devices that begin late."""

from typing import Any

LATE_CYCLES = 20_000_000
"""About ten milliseconds, far longer than a task of this model."""


class LateCopies:
    """A transport of which every fourth copy begins later, after a busy kernel on another stream."""

    def __init__(self, transport: Any, seed: int) -> None:
        import random

        import torch

        self._transport = transport
        self._choice = random.Random(seed)
        self._side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's own gap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, target: Any, tensor: Any) -> None:
        import torch

        if self._choice.random() < 0.75:
            self._transport.send(target, tensor)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(self._choice.randrange(LATE_CYCLES))  # type: ignore[no-untyped-call]
            self._transport.send(target, tensor)
        tensor.record_stream(self._side)
