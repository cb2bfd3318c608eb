"""Decode steps as CUDA graphs: captured when a shape is met first, replayed afterwards."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_WARM = 2
"""Runs before a capture, in which libraries set themselves up. They write what the replay writes again."""


class Graphs:
    """Runs computations by the key of their shapes: as they are, or as one CUDA graph per key.

    A computation must read its inputs from the same memory in every call, and may not wait for the device. What it
    returns is overwritten by the next run of its key.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._known: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def run(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What `compute` gives."""
        if not self.enabled:
            return compute()
        if key not in self._known:
            self._known[key] = self._captured(compute)
        graph, result = self._known[key]
        graph.replay()
        found: T = result
        return found

    def clear(self) -> None:
        """Capture anew from now on, into new memory: what is left of the old one may still be in use."""
        self._known.clear()
        self._pool = None

    def _captured(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, Any]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's own gap
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _own_workspace(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()  # other threads go on
        self._pool = graph.pool()
        return graph, result


@contextlib.contextmanager
def _own_workspace() -> Iterator[None]:
    """Make cuBLAS take its workspace from the memory of the graph.

    torch keeps one for each stream. A graph that has another's baked in reads freed memory when somebody clears them,
    as torch.compile does where it makes graphs of its own.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
