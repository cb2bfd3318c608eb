"""A computation as several CUDA graphs, with work of the host before, between and around them."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatronapp_trainer.hooks.step_observer import CollectiveSpan

_EMPTY = "The CUDA Graph is empty"
"""Begin of torch's warning at the end of a capture in which nothing was launched."""


class GraphParts:
    """Captures a computation, and cuts it where it is asked to.

    All parts are captured one after another on one stream, in one memory pool, and replayed in the same order. So what
    a part leaves for a later one holds its memory until that part has freed it.

    A backward pass is cut on autograd's thread, while its capture began on the thread that called autograd. Only
    captures in CUDA's relaxed mode may end on another thread. In that mode no call fails that cannot be captured, such
    as a wait for the device; it fails where the same passes are captured as a whole.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:  # noqa: ANN401 - torch's handle
        """Take the stream of the captures, and the memory that they share with others of the slot."""
        self._stream = stream
        self._pool = pool
        self._parts: list[Callable[[], None]] = []
        """Functions that a replay calls, in order."""
        self._empty: list[torch.cuda.CUDAGraph] = []
        """Graphs without a launch, which hold the pool: torch frees it with the last graph that was captured in it."""
        self._open: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture what runs inside."""
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()  # memory that is free elsewhere may be needed by the pool
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                yield
            finally:
                self._end(None)

    def isolate(self, call: Callable[[], Any], span: CollectiveSpan) -> Any:  # noqa: ANN401 - of the function
        """Capture `call` as a separate graph, which `span` replays. Returns its result.

        No other stream may take part in the capture at this point, nor after `call` has returned.
        """
        self._end(None)
        self._begin()
        result = call()
        self._end(span)
        self._begin()
        return result

    def insert(self, call: Callable[[], None]) -> None:
        """Call a function in each replay at this point of the computation; now it is not called.

        No other stream may take part in the capture at this point.
        """
        self._end(None)
        self._parts.append(call)
        self._begin()

    def replay(self) -> None:
        """Launch the parts on the current stream, in order."""
        for part in self._parts:
            part()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        self._open = graph

    def _end(self, span: CollectiveSpan | None) -> None:
        """End the capture that has begun. A part in which nothing was launched is not replayed."""
        graph, self._open = self._open, None
        if graph is None:  # a cut has failed
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        messages = [str(warning.message) for warning in caught]
        if any(message.startswith(_EMPTY) for message in messages):
            self._empty.append(graph)
        else:
            self._parts.append(graph.replay if span is None else functools.partial(span, graph.replay))
