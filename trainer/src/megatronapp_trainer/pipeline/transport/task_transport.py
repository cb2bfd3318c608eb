"""The interface over which the tasks of pipeline ranks pass on their tensors."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy, PassKey, TransferObserver
from megatronapp_trainer.pipeline.planning.tasks import Placement, RankTask, Task, TaskKind


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

    def copied_ns(self, task: Task) -> tuple[int, int]:
        """Return start and end of the copy of an input that has arrived in this step, on the node's monotonic clock."""

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until an input or a decision arrives, at most `limit_s` seconds if given.

        Raises PeerLostError for a rank that is lost or takes too long.
        """

    def received_seconds(self) -> list[float]:
        """Return the duration of each transfer that this rank has received in this step."""

    def close(self) -> None:
        """End the transport; what was sent is delivered first."""


class _Withheld(NamedTuple):
    tensor: torch.Tensor
    copy: ObservedCopy
    release_ns: int


class ObservedTaskTransport:
    """Announces the transfers of a rank's tasks to an observer, and withholds messages for a fault."""

    def __init__(
        self,
        transport: TaskTransport,
        observer: TransferObserver,
        *,
        placement: Placement,
        rank: int,
        pipeline: Sequence[int],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Take a transport of pipeline rank `rank`.

        `pipeline`: ranks of the world by pipeline rank; `now_ns`: the node's monotonic clock.
        """
        self._transport = transport
        self._observer = observer
        self._placement = placement
        self._rank = rank
        self._pipeline = pipeline
        self._now_ns = now_ns
        self._withheld: dict[Task, _Withheld] = {}

    def begin_step(self, expected: Iterable[Task]) -> None:
        """Begin a step of the transport."""
        self._transport.begin_step(expected)

    def send(self, target: RankTask, tensor: torch.Tensor) -> None:
        """Start to send, and announce it."""
        with self._observer.sending(self._pipeline[target.rank], pass_of(target.task), _size_bytes(tensor)):
            self._transport.send(target, tensor)

    def poll(self) -> dict[Task, torch.Tensor]:
        """Return the inputs that have arrived and are not withheld any more, and announce them."""
        for task, tensor in self._transport.poll().items():
            source = self._placement.previous_task(self._rank, task)
            assert source is not None
            copy = ObservedCopy(self._pipeline[source.rank], _size_bytes(tensor), *self._transport.copied_ns(task))
            self._withheld[task] = _Withheld(tensor, copy, self._observer.release_ns(copy))
        if not self._withheld:
            return {}
        now_ns = self._now_ns()
        released = [task for task, message in self._withheld.items() if message.release_ns <= now_ns]
        inputs = {}
        for task in released:
            message = self._withheld.pop(task)
            inputs[task] = message.tensor
            self._observer.arrived(pass_of(task), message.copy)
        return inputs

    def copied_ns(self, task: Task) -> tuple[int, int]:
        """Return the times of the transport."""
        return self._transport.copied_ns(task)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait within what the observer opens for it, at most until a message is to be handed out."""
        if self._withheld:
            release_ns = min(message.release_ns for message in self._withheld.values())
            until_s = max(0.0, 1e-9 * (release_ns - self._now_ns()))
            limit_s = until_s if limit_s is None else min(limit_s, until_s)
        with self._observer.waiting():
            self._transport.wait(limit_s)

    def received_seconds(self) -> list[float]:
        """Return the durations of the transport."""
        return self._transport.received_seconds()

    def close(self) -> None:
        """End the transport; what was sent is delivered first."""
        self._transport.close()


def pass_of(task: Task) -> PassKey:
    """Return the pass that a task is."""
    return PassKey(_KINDS[task.kind], task.chunk, task.microbatch)


_KINDS = {
    TaskKind.FORWARD: RecordKind.FORWARD,
    TaskKind.BACKWARD: RecordKind.BACKWARD,
    TaskKind.WEIGHT: RecordKind.WEIGHT,
}


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
