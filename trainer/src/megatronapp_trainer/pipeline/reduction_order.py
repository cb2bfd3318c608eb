"""Overlapped gradient reductions in one order on all replicas, also where their tasks have another one.

megatron-core's DistributedDataParallel reduces a group of buckets as soon as all its gradients are ready. A collective
needs the same order on all its ranks, which static schedules give. Replicas whose tasks run in orders of their own, or
of which one splits a backward pass that another one does not, get their gradients ready in different orders.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


def order_reductions(chunks: list[Any]) -> None:
    """Let reductions begin from the last chunk to the first, and in each in the order of its buckets.

    This is the order in which whole backward passes end. A reduction that is ready earlier begins with the last one
    before it. Chunks in megatron-core's DistributedDataParallel, all of this rank; calling it again changes nothing.
    """
    groups = [
        group for chunk in reversed(chunks) for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    if any(isinstance(group.start_grad_sync, _OrderedStart) for group in groups):
        return
    sequence = _Sequence(len(groups))
    for place, group in enumerate(groups):
        group.start_grad_sync = _OrderedStart(sequence, place, group, group.start_grad_sync)


class _Sequence:
    """Runs what is ready at places 0 .. count - 1 in the order of places, again and again."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0
        self._ready: dict[int, Callable[[], None]] = {}

    def run_in_order(self, place: int, function: Callable[[], None]) -> None:
        """Run the function once those of all places before it have run."""
        self._ready[place] = function
        while (ready := self._ready.pop(self._next, None)) is not None:
            ready()
            self._next = (self._next + 1) % self._count


@dataclasses.dataclass(frozen=True, slots=True)
class _OrderedStart:
    """Takes the place of `start_grad_sync` of a group of buckets."""

    sequence: _Sequence
    place: int
    group: Any
    start: Callable[..., None]

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of megatron-core
        """Begin the reduction once all before it have begun.

        In the first step, and in all without overlap, megatron-core begins it at the end of the step in a fixed order.
        """
        if self.group.is_first_batch or not self.group.ddp_config.overlap_grad_reduce:
            return self.start(*args, **kwargs)
        return self.sequence.run_in_order(self.place, lambda: self.start(*args, **kwargs))
