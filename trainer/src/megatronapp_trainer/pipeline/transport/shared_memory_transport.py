"""The tasks' transfers between ranks that share memory, and the leader's log of a tensor group."""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatronapp_common.names import Env
from megatronapp_trainer.errors import TransferTimeoutError
from megatronapp_trainer.pipeline.planning.tasks import RankTask, Task
from megatronapp_trainer.pipeline.transport.inboxes import Inboxes
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorTransport, TransportOptions


class SharedMemoryTransport:
    """A `TaskTransport` over shared memory; a received tensor is a view of it until no task needs it any more."""

    def __init__(self, inboxes: Inboxes, *, threads: int, deadline_s: float) -> None:
        """Connect to the neighbours in the pipeline and to the tensor group; collective over the world.

        Args:
            inboxes: of this rank.
            threads: threads that copy messages of this rank.
            deadline_s: seconds after which a rank that sends nothing is an error.

        Raises:
            UsageError: ranks of a pipeline or of a tensor group share no memory, or too little.
            PeerLostError: a rank did not connect.
        """
        self._placement = inboxes.placement
        self._spec = inboxes.spec
        own, tensor = dist.get_rank(), inboxes.addresses.tensor
        self._pipeline = inboxes.addresses.pipeline
        self._rank = self._pipeline.index(own)
        self._leader = tensor[0]
        self._follows = own != self._leader
        peers = inboxes.neighbours
        boards = [rank for rank in tensor if rank != own]
        options = TransportOptions(
            job=inboxes.agree(),
            attempt=int(os.environ.get(Env.ATTEMPT, "0")),
            rank=own,
            slot_bytes=inboxes.slot_bytes,
            slots=inboxes.slots,
            threads=threads,
            deadline_s=deadline_s,
        )
        self._transport = TensorTransport(options, peers=peers, boards=boards)
        self._transport.connect()
        if own == self._leader and boards:
            self._transport.lead(boards)
        self._step = -1
        self._expected: dict[Task, int] = {}
        self._copied_ns: dict[Task, tuple[int, int]] = {}
        self._seen: int | None = None
        self._received_seconds: list[float] = []

    def begin_step(self, expected: Iterable[Task]) -> None:
        """Begin a step. `expected`: the tasks of this rank whose inputs other ranks send."""
        self._step += 1
        self._seen = None
        self._expected = {}
        self._received_seconds = []
        self._copied_ns = {}
        for task in expected:
            source = self._placement.previous_task(self._rank, task)
            assert source is not None
            self._expected[task] = self._pipeline[source.rank]

    def send(self, target: RankTask, tensor: torch.Tensor) -> None:
        """Start to send a tensor to the pipeline rank of its task."""
        self._transport.send(self._pipeline[target.rank], target.task.pack(self._step), tensor)

    def poll(self) -> dict[Task, torch.Tensor]:
        """Return the inputs that have arrived since the last call."""
        activity = self._transport.activity()
        if activity == self._seen:
            return {}
        self._seen = activity
        arrived = {}
        for task, sender in self._expected.items():
            message = self._transport.poll(sender, task.pack(self._step), self._spec)
            if message is not None:
                arrived[task] = message.tensor
                start_ns, end_ns = message.copied_ns
                self._copied_ns[task] = start_ns, end_ns
                self._received_seconds.append(1e-9 * (end_ns - start_ns))
        for task in arrived:
            del self._expected[task]
        return arrived

    def copied_ns(self, task: Task) -> tuple[int, int]:
        """Return start and end of the sender's copy of an input that has arrived in this step."""
        return self._copied_ns[task]

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until an input or a decision arrives, at most `limit_s` seconds if given.

        Raises PeerLostError for a rank that is lost or takes too long.
        """
        assert self._seen is not None
        if not self._transport.wait_activity(self._seen, limit_s) and limit_s is None:
            missing = ", ".join(f"{task} from rank {sender}" for task, sender in list(self._expected.items())[:4])
            if self._follows:
                missing = f"a decision of rank {self._leader}" + (f", or {missing}" if missing else "")
            raise TransferTimeoutError(
                f"nothing arrived for {self._transport.options.deadline_s:g} s; expected next: {missing or 'nothing'}"
            )

    def received_seconds(self) -> list[float]:
        """Return the duration of each copy that this rank has received in this step."""
        return self._received_seconds

    def append(self, entry: int) -> None:
        """Publish an entry to the followers of this rank."""
        self._transport.append(entry)

    def poll_entry(self) -> int | None:
        """Return the next entry of this rank's leader, if it is there."""
        return self._transport.poll_decision(self._leader)

    def close(self) -> None:
        """End the transport; what was sent is delivered first."""
        self._transport.close()

    def abort(self) -> None:
        """End the transport after a failure; ranks that wait for this one get PeerLostError."""
        self._transport.close(drain=False)
