"""The interface over which the tasks of pipeline ranks pass on their tensors."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from megatronapp_common.trace import RecordKind, TransferPath
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy, PassKey, TransferObserver
from megatronapp_trainer.pipeline.planning.tasks import Placement, RankTask, Task, TaskKind


class Posted(NamedTuple):
    """An input that is on its way: its sender's device has queued the copy, after the task that makes it."""

    sender: int
    """Pipeline rank."""
    number: int
    """Number of the task that makes it, as its sender's `mark_progress` counts them; its sender is that far when the
    copy begins.
    """


class TaskTransport(Protocol):
    """Transfers between the tasks of a step, any number at a time, in any order.

    A tensor is addressed to the task that takes it as its input. All shapes are equal: hidden states of a microbatch.

    On devices a tensor is sent in the order of the current stream, and a received one is for work on the current
    stream: it returns to its sender once the work is done that was enqueued there before its last reference ended.
    """

    def begin_step(self, expected: Iterable[Task]) -> None:
        """Begin a step. `expected`: the tasks of this rank whose inputs other ranks send."""

    def send(self, target: RankTask, tensor: torch.Tensor) -> None:
        """Start to send a tensor to the pipeline rank of its task; it is not changed before it has left."""

    def poll(self) -> dict[Task, torch.Tensor]:
        """Return the inputs that have arrived since the last call."""

    def posted(self) -> dict[Task, Posted]:
        """Return the inputs that are on their way and that neither `poll` nor `take_posted` has returned.

        Empty where transfers have no queue on a device: an input is then there or not.
        """

    def take_posted(self, task: Task) -> torch.Tensor:
        """Return an input on its way, for work on the current stream, which waits on the device for its copy.

        `poll` does not return the input any more. Raises KeyError for a task that `posted` did not have.
        """

    def mark_progress(self, index: int, stream: torch.cuda.Stream | None = None) -> None:
        """Publish `index` to the other ranks once the work enqueued on a stream (the current one) so far has ended.

        On the host: at once. Numbers of tasks in the order of this rank, over all steps; 0 before the first one.
        """

    def sender_progress(self, task: Task) -> int:
        """Return the last number that the sender of an input has published by `mark_progress`."""

    def copied_ns(self, task: Task) -> tuple[int, int] | None:
        """Return start and end of the copy of an input of this step, on the node's monotonic clock.

        None while the copy of an input from `take_posted` has not ended.
        """

    def path_from(self, rank: int) -> TransferPath:
        """Return the path of the messages of a pipeline rank."""

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until an input or a decision arrives, at most `limit_s` seconds if given.

        Raises PeerLostError for a rank that is lost or takes too long.
        """

    def received_seconds(self) -> list[float]:
        """Return how long each input of this step took from the end of the task that made it until it was here."""

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
        self._taken_early: dict[Task, int] = {}

    def begin_step(self, expected: Iterable[Task]) -> None:
        """Begin a step of the transport."""
        self._announce_taken_early()
        self._taken_early = {}
        self._transport.begin_step(expected)

    def send(self, target: RankTask, tensor: torch.Tensor) -> None:
        """Start to send, and announce it."""
        with self._observer.sending(self._pipeline[target.rank], pass_of(target.task), _size_bytes(tensor)):
            self._transport.send(target, tensor)

    def poll(self) -> dict[Task, torch.Tensor]:
        """Return the inputs that have arrived and are not withheld any more, and announce them."""
        self._announce_taken_early()
        for task, tensor in self._transport.poll().items():
            copy = self._copy(task, _size_bytes(tensor))
            assert copy is not None
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

    def posted(self) -> dict[Task, Posted]:
        """Return the inputs on their way, but for those from ranks whose messages a fault withholds."""
        return {
            task: posted
            for task, posted in self._transport.posted().items()
            if not self._observer.withholds(self._pipeline[posted.sender])
        }

    def take_posted(self, task: Task) -> torch.Tensor:
        """Return an input on its way; its copy is announced once it has ended."""
        tensor = self._transport.take_posted(task)
        self._taken_early[task] = _size_bytes(tensor)
        return tensor

    def mark_progress(self, index: int, stream: torch.cuda.Stream | None = None) -> None:
        """Publish a number over the transport."""
        self._transport.mark_progress(index, stream)

    def sender_progress(self, task: Task) -> int:
        """Return the number of the transport."""
        return self._transport.sender_progress(task)

    def copied_ns(self, task: Task) -> tuple[int, int] | None:
        """Return the times of the transport."""
        return self._transport.copied_ns(task)

    def path_from(self, rank: int) -> TransferPath:
        """Return the path of the transport."""
        return self._transport.path_from(rank)

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

    def _announce_taken_early(self) -> None:
        for task, size_bytes in list(self._taken_early.items()):
            copy = self._copy(task, size_bytes)
            if copy is not None:
                del self._taken_early[task]
                self._observer.arrived(pass_of(task), copy)

    def _copy(self, task: Task, size_bytes: int) -> ObservedCopy | None:
        copied_ns = self._transport.copied_ns(task)
        source = self._placement.previous_task(self._rank, task)
        assert source is not None
        if copied_ns is None:
            return None
        return ObservedCopy(
            self._pipeline[source.rank], size_bytes, *copied_ns, path=self._transport.path_from(source.rank)
        )


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
