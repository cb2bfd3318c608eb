"""The interface over which the tasks of pipeline ranks pass on their tensors."""

from collections.abc import Iterable
from typing import Protocol

import torch

from megatronapp_trainer.pipeline.planning.tasks import RankTask, Task


class TaskTransport(Protocol):
    """Transfers between the tasks of a step, any number at a time, in any order.

    A tensor is addressed to the task that takes it as its input. All shapes are equal: hidden states of a microbatch.
    """

    def begin_step(self, expected: Iterable[Task]) -> None:
        """Begin a step. `expected`: the tasks of this rank whose inputs other ranks send."""

    def send(self, target: RankTask, tensor: torch.Tensor) -> None:
        """Start to send a tensor to the pipeline rank of its task; it is not changed before it has left."""

    def poll(self) -> dict[Task, torch.Tensor]:
        """Return the inputs that have arrived since the last call."""

    def wait(self) -> None:
        """Wait until an input or a decision arrives. Raises PeerLostError for a rank that is lost or takes too long."""

    def received_seconds(self) -> list[float]:
        """Return the duration of each transfer that this rank has received in this step."""

    def close(self) -> None:
        """End the transport; what was sent is delivered first."""
