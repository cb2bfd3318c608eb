"""Orders of the passes of forward and of backward ranks, and how far apart they may be.

Both roles keep megatron-core's static order of the pipeline: a forward rank runs its forward passes, a backward rank
its backward passes. A forward rank may be ahead of its backward ranks by the passes that have places in their memory.
"""

from typing import NamedTuple

from megatronapp_trainer.pipeline.planning.orders import interleaved, peak_in_flight
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


def places(placement: Placement, num_microbatches: int, rank: int) -> int:
    """Return how many passes a pipeline rank may have forward and not yet backward.

    At least as many as the static order has in flight there. Each rank may then run all that it could run under that
    order, so that no cycle of waits exists.
    """
    order = interleaved(placement, num_microbatches, rank)
    needed = peak_in_flight(order, (1,) * placement.chunks) + SPARE_PLACES
    return max(FEWEST_PLACES, min(needed, num_microbatches * placement.chunks))


def _passes(placement: Placement, num_microbatches: int, rank: int, kind: TaskKind) -> tuple[Pass, ...]:
    order = interleaved(placement, num_microbatches, rank)
    return tuple(Pass(task.microbatch, task.chunk) for task in order if task.kind is kind)
