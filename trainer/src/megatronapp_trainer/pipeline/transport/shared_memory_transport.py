"""The tasks' transfers within a node and between nodes, and the leader's log of a tensor group."""

import logging
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

import megatronapp_native as native
from megatronapp_common.names import Env
from megatronapp_common.trace import TransferPath
from megatronapp_trainer.errors import TransferTimeoutError
from megatronapp_trainer.pipeline.planning.tasks import RankTask, Task, TaskKind
from megatronapp_trainer.pipeline.transport.inboxes import Inboxes
from megatronapp_trainer.pipeline.transport.network import connected
from megatronapp_trainer.pipeline.transport.task_transport import Posted
from megatronapp_trainer.pipeline.transport.tensor_transport import ReceivedTensor, TransportOptions, transfer_path

logger = logging.getLogger(__name__)

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_FEWEST_CONNECTIONS = 8
"""Hardware queues of a device with which a stream that waits does not hold up another one; also CUDA's default."""
_PROGRESS_INDEX = 0
"""Index at which a rank publishes how many tasks it has ended."""
_SENT_INDEX = 1
"""First index at which it publishes, for each kind and chunk of the tasks that it sends to, the last one's number."""
_NUMBER_BITS = 40


class SharedMemoryTransport:
    """A `TaskTransport` within a node and, over UCX, to ranks of other nodes.

    A received tensor is a view of its message until no task needs it any more. Tensors are in memory of the host, or in
    memory of each rank's device.
    """

    def __init__(self, inboxes: Inboxes, *, threads: int, deadline_s: float) -> None:
        """Connect to the neighbours in the pipeline and to the tensor group; collective over the world.

        Args:
            inboxes: of this rank.
            threads: threads that copy messages of this rank.
            deadline_s: seconds after which a rank that sends nothing is an error.

        Raises:
            UsageError: too little shared memory, or no path to a rank on another node.
            PeerLostError: a rank did not connect.
        """
        self._placement = inboxes.placement
        self._spec = inboxes.spec
        own, tensor = dist.get_rank(), inboxes.addresses.tensor
        self._pipeline = inboxes.addresses.pipeline
        self._rank = self._pipeline.index(own)
        self._leader = tensor[0]
        self._follows = own != self._leader
        agreement = inboxes.agree()
        self._device = inboxes.device
        # The order of a stream reaches no other node.
        self._publishes_by_stream = inboxes.device is not None and not agreement.spans_nodes
        self._waits_on_device = self._publishes_by_stream and _streams_may_wait()
        if inboxes.device is not None and agreement.spans_nodes and own == 0:
            logger.info("ranks with GPUs are on several nodes: no task is launched before its input is there")
        options = TransportOptions(
            job=agreement.job,
            attempt=int(os.environ.get(Env.ATTEMPT, "0")),
            rank=own,
            slot_bytes=inboxes.slot_bytes,
            slots=inboxes.slots,
            threads=threads,
            deadline_s=deadline_s,
            device=inboxes.device,
            pinned=agreement.pinned,
        )
        self._peers = [*inboxes.neighbours, *inboxes.boards]
        self._transport = connected(options, inboxes, agreement)
        if own == self._leader and inboxes.boards:
            self._transport.lead(inboxes.boards)
        self._step = -1
        self._number = 0
        """Number of the task that has ended last on this rank, over all steps."""
        self._expected: dict[Task, int] = {}
        self._tasks: dict[int, Task] = {}
        """Tasks of the step by the key of their input."""
        self._arrived: dict[int, ReceivedTensor] = {}
        """Tensors by key that are not handed out: a neighbour may be a step ahead."""
        self._copied_ns: dict[Task, tuple[int, int]] = {}
        self._taken_posted: dict[Task, native.TransportMessage] = {}
        self._seen: int | None = None
        self._received_seconds: list[float] = []

    def begin_step(self, expected: Iterable[Task]) -> None:
        """Begin a step. `expected`: the tasks of this rank whose inputs other ranks send."""
        self._step += 1
        self._seen = None
        self._expected = {}
        self._tasks = {}
        self._received_seconds = []
        self._copied_ns = {}
        self._taken_posted = {}
        for task in expected:
            source = self._placement.previous_task(self._rank, task)
            assert source is not None
            self._expected[task] = self._pipeline[source.rank]
            self._tasks[task.pack(self._step)] = task

    def send(self, target: RankTask, tensor: torch.Tensor) -> None:
        """Start to send a tensor to the pipeline rank of its task."""
        self._transport.publish(_sent_index(target.task), target.task.microbatch << _NUMBER_BITS | self._number)
        self._transport.send(self._pipeline[target.rank], target.task.pack(self._step), tensor)

    def poll(self) -> dict[Task, torch.Tensor]:
        """Return the inputs that have arrived since the last call.

        Raises PeerLostError for a rank that is lost, also if it has sent all: no rank closes its transport within a
        step, so that the step cannot end. A rank that waits for a third one learns of it at once in this way.
        """
        activity = self._transport.activity()
        if activity == self._seen:
            return {}
        self._seen = activity
        while messages := self._transport.take_arrived(self._peers, self._spec):
            self._arrived |= {message.key: message for message in messages}
        keys = [key for key in self._arrived if key in self._tasks]
        return {self._tasks[key]: self._take(key) for key in keys}

    def _take(self, key: int) -> torch.Tensor:
        message = self._arrived.pop(key)
        task = self._tasks[key]
        start_ns, end_ns = message.copied_ns
        self._copied_ns[task] = start_ns, end_ns
        self._received_seconds.append(1e-9 * (end_ns - message.queued_ns))
        del self._expected[task]
        return message.tensor

    def posted(self) -> dict[Task, Posted]:
        """Return the inputs that senders' devices have in their queues; none where tasks cannot wait for them."""
        if not self._waits_on_device:
            return {}
        return {
            self._tasks[key]: Posted(self._pipeline.index(sender), self.sent_number(self._tasks[key]))
            for sender, key in self._transport.posted(self._peers)
            if key in self._tasks
        }

    def take_posted(self, task: Task) -> torch.Tensor:
        """Return an input on its way, for which the current stream waits."""
        key = task.pack(self._step)
        sender = self._expected[task]
        message = None if self._device is None else self._transport.poll(sender, key, self._spec, posted=True)
        if message is None:
            raise KeyError(task)
        self._taken_posted[task] = message.message
        del self._expected[task]
        return message.tensor

    def mark_progress(self, index: int, stream: torch.cuda.Stream | None = None) -> None:
        """Publish a number to the other ranks, on a device in the order of a stream, by default the current one."""
        self._number = index
        if not self._publishes_by_stream:
            stream = None
        elif stream is None:
            stream = torch.cuda.current_stream(self._device)
        self._transport.publish(_PROGRESS_INDEX, index, stream)

    def sender_progress(self, task: Task) -> int:
        """Return the last number that the sender of an input has published."""
        source = self._placement.previous_task(self._rank, task)
        assert source is not None
        return self._transport.progress(self._pipeline[source.rank], _PROGRESS_INDEX)

    def sent_number(self, task: Task) -> int:
        """Return the number of the task that makes an input on its way, or of a later one of its kind and chunk."""
        source = self._placement.previous_task(self._rank, task)
        assert source is not None
        sent = self._transport.progress(self._pipeline[source.rank], _sent_index(task))
        return sent & (1 << _NUMBER_BITS) - 1

    def copied_ns(self, task: Task) -> tuple[int, int] | None:
        """Return start and end of the sender's copy of an input of this step; None while it has not ended."""
        message = self._taken_posted.get(task)
        if message is not None and message.copied_ns is not None:
            self._copied_ns[task] = message.copied_ns
            self._received_seconds.append(1e-9 * (message.copied_ns[1] - message.queued_ns))
            del self._taken_posted[task]
        return None if task in self._taken_posted else self._copied_ns[task]

    def path_from(self, rank: int) -> TransferPath:
        """Return the path of the messages of a pipeline rank."""
        return transfer_path(self._transport.paths[self._pipeline[rank]])

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
        """Return how long each input of this step took from the end of its task until it was here.

        Waits for a slot and for a thread of the sender are part of it.
        """
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


def _streams_may_wait() -> bool:
    """Return whether streams have hardware queues of their own; the log of rank 0 says so if not."""
    connections = int(os.environ.get(_CONNECTIONS, _FEWEST_CONNECTIONS))
    if connections < _FEWEST_CONNECTIONS and dist.get_rank() == 0:
        logger.warning(
            "%s=%d: a task that waits on its device could hold up what it waits for, so no task is launched early, and "
            "tasks begin once their inputs are there; set it to %d or more (in a manifest: spec.env). With tensor "
            "parallelism the launcher sets 1, with which megatron-core overlaps its communication",
            _CONNECTIONS,
            connections,
            _FEWEST_CONNECTIONS,
        )
    return connections >= _FEWEST_CONNECTIONS


def _sent_index(task: Task) -> int:
    return _SENT_INDEX + 2 * task.chunk + (task.kind is TaskKind.BACKWARD)
