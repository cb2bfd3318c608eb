"""Decode steps as CUDA graphs: captured when a shape is met first, replayed afterwards."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol, TypeVar

import cachetools
import torch

T = TypeVar("T")
MOST_FAMILIES = 8
_WARM = 2
"""Number of runs before a capture, in which libraries initialise. They write what the replay writes again."""
Replay = Callable[[], None]


class GraphCapture(Protocol):
    """Makes a graph of a computation, in memory that graphs of its family share."""

    def __call__(self, compute: Callable[[], T], pool: Any) -> tuple[Replay, T, Any]:  # noqa: ANN401 - torch's handle
        """Return the replay function, the result, which each replay overwrites, and the memory."""


@dataclasses.dataclass(kw_only=True)
class _GraphFamily:
    known: dict[tuple[int, Hashable], tuple[Replay, Any]] = dataclasses.field(default_factory=dict)
    pools: dict[int, Any] = dataclasses.field(default_factory=dict)


class GraphCache:
    """Runs computations by the key of their shapes: directly, or as one CUDA graph per key.

    A computation must read its inputs from the same memory in every call, and may not wait for the device. Its result
    is overwritten by the next run of its key.

    Keys belong to families. Graphs of one family and turn share memory, so a result may be read until another of that
    turn runs; all of it is free again when the family is forgotten. The family None stays, and of the others the `most`
    that ran last. Ranks whose graphs hold collectives must run equal families in equal order, so that all capture, or
    all replay.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        most: int = MOST_FAMILIES,
        forget: Callable[[Hashable], None] = lambda _family: None,
        capture: "GraphCapture | None" = None,
    ) -> None:
        """Create the cache; `forget` is called for each family whose graphs are dropped."""
        self.enabled = enabled
        self._forget = forget
        self._capture = capture or captured
        self._lasting = _GraphFamily()
        self._families: cachetools.LRUCache[Hashable, _GraphFamily] = cachetools.LRUCache(most)

    def run(self, family: Hashable, key: Hashable, compute: Callable[[], T], *, buffer_set: int = 0) -> T:
        """Return the result of `compute`, run directly or replayed."""
        if not self.enabled:
            return compute()
        graphs = self._graphs_of(family)
        if (buffer_set, key) not in graphs.known:
            replay, result, graphs.pools[buffer_set] = self._capture(compute, graphs.pools.get(buffer_set))
            graphs.known[buffer_set, key] = replay, result
        replay, result = graphs.known[buffer_set, key]
        replay()
        typed_result: T = result
        return typed_result

    def drop(self, unwanted: Callable[[Hashable], bool]) -> None:
        """Drop the graphs of the unwanted families."""
        for family in [family for family in self._families if unwanted(family)]:
            self._drop(family, self._families.pop(family))

    def clear(self) -> None:
        """Capture again from now on, into new memory: the rest of the old one may still be in use."""
        self._lasting = _GraphFamily()
        self.drop(lambda _family: True)

    def _graphs_of(self, family: Hashable) -> _GraphFamily:
        if family is None:
            return self._lasting
        if family not in self._families:
            if self._families.currsize == self._families.maxsize:  # free the memory before the next capture needs it
                self._drop(*self._families.popitem())
            self._families[family] = _GraphFamily()
        return self._families[family]

    def _drop(self, family: Hashable, graphs: _GraphFamily) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a replay may still be under way
        graphs.known.clear()
        self._forget(family)


def captured(compute: Callable[[], T], pool: Any) -> tuple[Replay, T, Any]:  # noqa: ANN401 - torch's handle
    """Capture a computation as a CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's own gap
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with own_workspace(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = compute()  # other threads go on
    return graph.replay, result, graph.pool()


@contextlib.contextmanager
def own_workspace() -> Iterator[None]:
    """Make cuBLAS take its workspace from the memory of the graph.

    torch keeps one for each stream. A graph that uses another's workspace reads freed memory once that is cleared, as
    torch.compile does when it makes graphs.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
