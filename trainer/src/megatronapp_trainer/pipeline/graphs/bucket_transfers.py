"""Transfers of data parallelism that overlap passes: gathers of weights, and reductions of gradients.

megatron-core's DistributedDataParallel keeps the parameters of a chunk in groups of buckets. Hooks before the modules
of a forward pass wait for the weights of a group and begin the gather of the next one; hooks of the last backward pass
begin the reduction of a group with the last of its gradients. A recorded pass has the computations between these
places, and the host calls the same functions of the groups at the same places in each replay.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

Insert = Callable[[Callable[[], None]], None]
"""Has a function called at this place of a computation in each replay."""


class BucketTransfers:
    """The transfers of one chunk that a pass begins and awaits."""

    def __init__(self, chunk: Any, *, gathers: bool, reduces: bool) -> None:  # noqa: ANN401 - DDP
        """Take a chunk in DistributedDataParallel.

        Args:
            chunk: whose passes are recorded.
            gathers: the forward pass gathers weights (`--overlap-param-gather`, first microbatch).
            reduces: the backward pass reduces gradients (`--overlap-grad-reduce`, last microbatch).
        """
        self._groups: list[Any] = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        self._gathers = gathers
        self._reduces = reduces

    @contextlib.contextmanager
    def postponed(self, insert: Insert) -> Iterator[None]:
        """Within the context no transfer begins and none is awaited: replays do both, by what is given to `insert`."""
        with contextlib.ExitStack() as replaced:
            for group in self._groups:
                if self._gathers:
                    finish = _Once(insert, group.finish_param_sync)
                    replaced.enter_context(_replaced(group, "finish_param_sync", finish))
                if self._reduces:
                    start = _Once(insert, group.start_grad_sync)
                    replaced.enter_context(_replaced(group, "start_grad_sync", start))
                    replaced.callback(setattr, group, "per_param_grad_ready_counts", {})
            yield


class _Once:
    """Inserts a function of a group in its place, with the arguments of the first call; later calls do nothing.

    Each module of a pass waits for its weights, and only the first of a group finds them missing.
    """

    def __init__(self, insert: Insert, function: Callable[..., None]) -> None:
        self._insert = insert
        self._function = function
        self._is_inserted = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of megatron-core
        if not self._is_inserted:
            self._is_inserted = True
            self._insert(functools.partial(self._function, *args, **kwargs))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., None]) -> Iterator[None]:  # noqa: ANN401 - any object
    """Let an object have another method of this name within the context."""
    own = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
