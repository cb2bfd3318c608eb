"""Choice of the next pass on forward and on backward ranks of MegaFBD, by the policies of MegaDPP.

Knows no time, no tensors and no transport: ranks say what has arrived, and run what is chosen.
"""

from typing import NamedTuple

from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.orders import Pass, PassOrders, forward_order
from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind


class ChosenForward(NamedTuple):
    """A forward pass that runs next."""

    replica: int
    """Index among the replicas that the rank serves."""
    own: Pass
    early: bool
    """True if a pass that precedes it in the static order has not run."""


class _ReplicaPasses:
    """Forward passes of one replica in one step."""

    def __init__(self, orders: PassOrders, rank: int, num_microbatches: int) -> None:
        self.progress = RankProgress(orders.placement, rank, num_microbatches, split=False)
        self.policy = orders.forward_policy(num_microbatches, rank)
        self.left = list(forward_order(orders.placement, num_microbatches, rank))
        """Passes that have not run, in the static order."""
        self.received = [0] * orders.placement.chunks
        """Microbatches by chunk whose inputs have arrived."""
        self.run = 0


class ForwardChoice:
    """Chooses the forward passes of one step on a forward rank, for all replicas that it serves.

    A pass needs its input, and a place in the memory of the replica's backward rank.
    """

    def __init__(self, orders: PassOrders, rank: int, num_microbatches: int, replicas: int) -> None:
        """Begin a step on a pipeline rank."""
        self._placement = orders.placement
        self._has_plan = orders.schedule == "auto"
        self._rank = rank
        self._num_microbatches = num_microbatches
        self._replicas = [_ReplicaPasses(orders, rank, num_microbatches) for _ in range(replicas)]

    @property
    def are_left(self) -> bool:
        """Return whether a pass has not run."""
        return any(replica.left for replica in self._replicas)

    def is_credited(self, replica: int) -> bool:
        """Return whether all passes of a replica have run, and a credit for each has arrived."""
        return not self._replicas[replica].progress.remaining

    def awaited(self) -> list[tuple[int, Pass]]:
        """Return replica and pass of the inputs that other ranks send next: of each chunk one."""
        return [
            (index, Pass(replica.received[chunk], chunk))
            for index, replica in enumerate(self._replicas)
            for chunk in range(self._placement.chunks)
            if self._placement.stage(self._rank, chunk) > 0 and replica.received[chunk] < self._num_microbatches
        ]

    def receive(self, replica: int, own: Pass) -> None:
        """Note that the input of an awaited pass has arrived."""
        self._replicas[replica].received[own.chunk] += 1
        self._replicas[replica].progress.receive(Task.forward(*own))

    def credit(self, replica: int, own: Pass) -> None:
        """Note that the memory of a pass is free again. Raises TransferError for a pass that cannot have ended."""
        progress, task = self._replicas[replica].progress, Task.backward(*own)
        if Task.forward(*own) in progress.done and task not in progress.done:
            progress.receive(task)
        if task not in progress.ready:
            raise TransferError(
                f"a credit for the backward pass of microbatch {own.microbatch} through chunk {own.chunk} has arrived, "
                "and that pass cannot have ended: backward passes of a chunk run in the order of their microbatches"
            )
        progress.run(task)

    def choose(self) -> ChosenForward | None:
        """Return the pass to run now, or None to wait; a replica that runs what is next in its plan has precedence."""
        offers = []
        for index, replica in enumerate(self._replicas):
            task = replica.policy.choose(replica.progress)
            if task is not None:
                own = Pass(task.microbatch, task.chunk)
                early = self._has_plan and own != replica.left[0]
                offers.append((early, replica.run, index, task))
        if not offers:
            return None
        early, _, index, task = min(offers)
        replica = self._replicas[index]
        own = Pass(task.microbatch, task.chunk)
        replica.progress.run(task)
        replica.left.remove(own)
        replica.run += 1
        return ChosenForward(index, own, early)


class BackwardChoice:
    """Chooses the backward and weight passes of one step on a backward rank.

    A backward pass needs the gradient of its output and all that its forward rank ships. Those of a chunk run in the
    order of their microbatches, so that sums of gradients have the same order under each policy.
    """

    def __init__(self, orders: PassOrders, rank: int, num_microbatches: int) -> None:
        """Begin a step on a pipeline rank."""
        self._num_microbatches = num_microbatches
        self._policy = orders.backward_policy(num_microbatches, rank)
        self._progress = RankProgress(orders.placement, rank, num_microbatches, split=orders.split_weights)
        for task in forward_tasks(orders.placement, num_microbatches):
            self._progress.receive(task)
            self._progress.run(task)
        self._ended = [0] * orders.placement.chunks
        """Backward passes by chunk that have run."""

    @property
    def are_left(self) -> bool:
        """Return whether a pass has not run."""
        return self._progress.remaining > 0

    @property
    def early(self) -> bool:
        """Return whether the task that was chosen last runs before its turn in the static order."""
        return self._policy.early

    def awaited(self) -> list[Pass]:
        """Return the backward passes whose messages are taken next: the next one of each chunk, if it lacks some."""
        return [
            Pass(microbatch, chunk)
            for chunk, microbatch in enumerate(self._ended)
            if microbatch < self._num_microbatches and Task.backward(microbatch, chunk) not in self._progress.ready
        ]

    def receive(self, own: Pass) -> None:
        """Note that all messages of an awaited pass have arrived."""
        self._progress.receive(Task.backward(*own))

    def choose(self) -> Task | None:
        """Return the backward or weight task to run now, or None to wait."""
        task = self._policy.choose(self._progress)
        if task is None:
            return None
        self._progress.run(task)
        if task.kind is TaskKind.BACKWARD:
            self._ended[task.chunk] += 1
        return task


def forward_tasks(placement: Placement, num_microbatches: int) -> list[Task]:
    """Return the forward tasks of a rank."""
    return [
        Task.forward(microbatch, chunk) for chunk in range(placement.chunks) for microbatch in range(num_microbatches)
    ]
