"""Protocols of the ranks that compute: a model runner of generation fits, and so may another one."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.hooks.forward_observer import ForwardObserver
from megatronapp_trainer.parallel.layout import Layout


class ObservedRunner(Protocol):
    """One rank's model while forward passes run."""

    model: Any
    layout: Layout
    vocab_size: int
    observer: ForwardObserver | None

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence."""

    @property
    def uses_graphs(self) -> bool:
        """True if decode steps are replayed as CUDA graphs."""

    @property
    def keys_LZTGD(self) -> torch.Tensor:
        """Cached keys by layer, slot, position, key head and channel."""

    def forget_graphs(self) -> None:
        """Capture CUDA graphs again from the next step on."""


class ObservedGroup(Protocol):
    """The ranks that compute together."""

    idle_window: IdleWindow

    def handle(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Call the handler for each command of this topic, at a step boundary."""
