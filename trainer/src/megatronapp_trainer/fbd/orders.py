"""Orders of the passes of forward and of backward ranks, and how far apart they may be.

Without MegaDPP both roles keep megatron-core's static order of the pipeline: a forward rank runs its forward passes, a
backward rank its backward passes. With it, each role chooses by the policy of MegaDPP's schedule. A forward rank may be
ahead of its backward ranks by the passes that have places in their memory.
"""

import dataclasses
from typing import NamedTuple

from megatronapp_trainer.pipeline.planning.memory import ChunkMemory, MemoryLimit
from megatronapp_trainer.pipeline.planning.orders import interleaved, peak_in_flight
from megatronapp_trainer.pipeline.planning.policies import Greedy, PlanGuided, Policy
from megatronapp_trainer.pipeline.planning.tasks import Placement, TaskKind

SPARE_PLACES = 2
"""Places beyond those that the static order needs: one pass is shipped while another runs backward, and none waits."""
FEWEST_PLACES = 3
"""With two places the forward rank waits for each backward pass (measured: half the throughput)."""
MOST_PENDING_WEIGHTS = 1
"""Backward passes whose weight gradients may wait for a gap: each keeps the memory of its shipments, or of what it has
recomputed, and the forward rank has no credit for it.
"""


class Pass(NamedTuple):
    """A forward or a backward pass of one rank in one step."""

    microbatch: int
    chunk: int


def forward_order(placement: Placement, num_microbatches: int, rank: int) -> tuple[Pass, ...]:
    """Return the forward passes of a pipeline rank in the order in which it runs them."""
    return _passes(placement, num_microbatches, rank, TaskKind.FORWARD)


def backward_order(placement: Placement, num_microbatches: int, rank: int) -> tuple[Pass, ...]:
    """Return the backward passes of a pipeline rank in the order in which it runs them."""
    return _passes(placement, num_microbatches, rank, TaskKind.BACKWARD)


@dataclasses.dataclass(frozen=True, slots=True)
class PassOrders:
    """How the ranks of both roles order the passes of a step."""

    placement: Placement
    schedule: str | None = None
    """Value of ``--dpp-schedule``; None without ``--use-dpp``."""

    @property
    def are_dynamic(self) -> bool:
        """Return whether ranks choose during the step; if not, each keeps its static order."""
        return self.schedule in {"auto", "dfc", "bfc"}

    @property
    def split_weights(self) -> bool:
        """Return whether weight gradients may be tasks of their own, as they are in MegaDPP's schedule."""
        return self.schedule in {None, "auto"}

    def places(self, num_microbatches: int, rank: int) -> int:
        """Return how many passes a pipeline rank may have forward and not yet backward.

        At least as many as the static order has in flight there; with `dfc` and `bfc` all passes of the microbatches
        that are admitted. Each rank may then run all that it could run under that order, or of the oldest microbatch,
        so that no cycle of waits exists.
        """
        if self._is_greedy:
            return self._admitted(num_microbatches) * self.placement.chunks
        order = interleaved(self.placement, num_microbatches, rank)
        needed = peak_in_flight(order, (1,) * self.placement.chunks) + SPARE_PLACES
        return max(FEWEST_PLACES, min(needed, num_microbatches * self.placement.chunks))

    def control_messages(self, num_microbatches: int, replicas: int) -> int:
        """Return the most messages, but shipments, that one rank has sent another which then keeps them.

        Hidden states and reports until the forward or backward pass that takes them, gradients until the credit of
        their pass: each is of a pass that has a place on one of the two ranks. With a slot for each, none has to wait
        for a message before it, so that passes may take them in any order.

        Args:
            num_microbatches: most of a step.
            replicas: served by a forward rank.
        """
        most = max(self.places(num_microbatches, rank) for rank in range(self.placement.ranks))
        return replicas * most + 1

    def forward_policy(self, num_microbatches: int, rank: int) -> Policy:
        """Return the policy of the forward passes of one replica in one step, for ranks that choose.

        Its progress has the forward passes that have run, and the backward passes for which a credit has arrived.
        """
        if self._is_greedy:
            return Greedy(depth_first=self.schedule == "dfc", admitted=self._admitted(num_microbatches))
        order = interleaved(self.placement, num_microbatches, rank)
        return PlanGuided(order, cap=self.places(num_microbatches, rank))

    def backward_policy(self, num_microbatches: int, rank: int) -> Policy:
        """Return the policy of the backward and weight passes of one step, for ranks that choose.

        In its progress all forward passes have run: what they have shipped says when a backward pass may.
        """
        if self._is_greedy:
            return Greedy(depth_first=self.schedule == "dfc", admitted=num_microbatches)
        chunks = self.placement.chunks
        return PlanGuided(
            interleaved(self.placement, num_microbatches, rank),
            cap=num_microbatches * chunks,
            memory=MemoryLimit(MOST_PENDING_WEIGHTS + 1, (ChunkMemory(activations=0, operands=1),) * chunks),
        )

    @property
    def _is_greedy(self) -> bool:
        return self.schedule in {"dfc", "bfc"}

    def _admitted(self, num_microbatches: int) -> int:
        """Return the microbatches that `dfc` and `bfc` admit: as many as stages, and those of the places to spare."""
        return min(self.placement.ranks + -(-SPARE_PLACES // self.placement.chunks), num_microbatches)


def _passes(placement: Placement, num_microbatches: int, rank: int, kind: TaskKind) -> tuple[Pass, ...]:
    order = interleaved(placement, num_microbatches, rank)
    return tuple(Pass(task.microbatch, task.chunk) for task in order if task.kind is kind)
