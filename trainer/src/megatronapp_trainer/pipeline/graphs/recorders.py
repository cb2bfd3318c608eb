"""Recordings of passes: CUDA graphs on a device, and repeated computations where there are none.

A recording computes into fixed memory, which the next replay overwrites. All recordings of a slot share their
memory. That is safe because they follow each other: forward, backward and weight gradients of a microbatch run in the
order in which they were recorded, on one stream, and the next microbatch enters the slot after the last of them. A
buffer that was temporary in a recording can then be reused by a later one, and what an earlier recording leaves for a
later one is held while that is recorded. Slots share no memory: schedules replay them in any order, so that a temporary
buffer of one slot could lie where another has activations that are still to be read.

Where collectives over the tensor group are observed, the recording of a pass is cut at the first one: what is before
it, the collective, and what is after it are parts, and a replay runs them in that order on one stream. Each replay
records the span of the collective around its part, by the observer's own means. Where transfers of data parallelism
overlap a pass, its recording is cut at each place where one begins or is waited for, and the host does that there.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from megatronapp_trainer.device.cuda_graphs import own_workspace
from megatronapp_trainer.device.graph_stream import graph_stream, on_graph_stream
from megatronapp_trainer.hooks.step_observer import CollectiveSpan, PassCollectives
from megatronapp_trainer.pipeline.graphs.bucket_transfers import BucketTransfers
from megatronapp_trainer.pipeline.graphs.graph_parts import GraphParts

Tensors = tuple[torch.Tensor, ...]
Compute = Callable[[], Tensors]


class Recording(Protocol):
    """A computation that can be run again."""

    def replay(self) -> Tensors:
        """Run it on what its inputs hold now. Returns its results, which the next replay overwrites."""


class SlotRecorder(Protocol):
    """Records the passes of one slot."""

    def record(self, compute: Compute, transfers: BucketTransfers | None = None) -> Recording:
        """Record a computation, which reads its inputs from the same memory in every replay.

        All that `compute` launches must have run before, so that libraries are initialised, kernels are compiled and
        communicators are connected. Whether it computes something while it is recorded is not said. Each replay begins
        and awaits the given transfers where the computation does.
        """

    def spoil(self, tensors: Tensors) -> None:
        """Take tensors of the slot that must not be read any more."""


class PassRecorders(Protocol):
    """Makes the recorders of the slots of a rank."""

    def slot(self) -> SlotRecorder:
        """Return the recorder of a new slot, which shares memory with no other."""

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Run the passes of a step inside, recorded ones and others."""

    def drop(self, slots: Sequence[list[Any] | dict[Any, Any]]) -> None:
        """Empty these collections, which alone refer to recordings, and free what they hold."""

    def reserved_bytes(self) -> int:
        """Return the memory that the process holds; the difference after some recordings is theirs."""


class GraphRecorders:
    """Makes recorders of CUDA graphs.

    Passes run on the stream on which the model's gradients are added (`device.graph_stream`). Captures do not mind what
    other threads do on the device: the watchdog of torch's process groups asks for the state of collectives of earlier
    steps at any time, which fails a capture in torch's default mode.
    """

    def __init__(self, device: torch.device, collectives: PassCollectives | None = None) -> None:
        """Take the device of the passes, and what observes their collectives, at which recordings are then cut."""
        self._device = device
        self._collectives = collectives

    def slot(self) -> SlotRecorder:
        """Return the recorder of a new slot, with a new memory pool."""
        return _GraphRecorder(self._device, self._collectives)

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Run the passes of a step on the stream of captures."""
        return on_graph_stream(self._device)

    def drop(self, slots: Sequence[list[Any] | dict[Any, Any]]) -> None:
        """Empty these collections of slots once no graph runs, and return the memory to the device."""
        torch.cuda.synchronize(self._device)
        _clear(slots)
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        """Return the bytes that torch has reserved on the device, without those that are free."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)


class _GraphRecorder:
    def __init__(self, device: torch.device, collectives: PassCollectives | None) -> None:
        self._stream = graph_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._collectives = collectives

    def record(self, compute: Compute, transfers: BucketTransfers | None = None) -> Recording:
        if self._collectives is not None or transfers is not None:
            return self._record_parts(compute, transfers)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with own_workspace(), capture:
            results = compute()
        return _GraphRecording(graph.replay, results)

    def _record_parts(self, compute: Compute, transfers: BucketTransfers | None) -> Recording:
        parts = GraphParts(self._stream, self._pool)
        with own_workspace(), parts.capturing(), contextlib.ExitStack() as stack:
            if self._collectives is not None:
                stack.enter_context(self._collectives.recording(parts.isolate))
            if transfers is not None:
                stack.enter_context(transfers.postponed(parts.insert))
            results = compute()
        return _GraphRecording(parts.replay, results)

    def spoil(self, tensors: Tensors) -> None:
        return None  # the next replay overwrites them


class _GraphRecording:
    def __init__(self, launch: Callable[[], None], results: Tensors) -> None:
        self._launch = launch
        self._results = results

    def replay(self) -> Tensors:
        self._launch()
        return self._results


@contextlib.contextmanager
def advice_on_shortage() -> Iterator[None]:
    """Add to torch's error of too little memory, of recordings inside, what to do about it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note("CUDA graphs were being recorded; --cuda-graph-impl none takes less memory, and is slower.")
        raise


class RepeatingRecorders:
    """Makes recorders that compute again in each replay, into the same memory, on any device.

    Numbers are those of passes without recordings, to the last bit. Floating-point tensors that must not be
    read any more are filled with NaN, so that a late reader is found. No time is saved: this is how slots are tested
    where there are no CUDA graphs.
    """

    def __init__(self, collectives: PassCollectives | None = None) -> None:
        """Take what observes the collectives of passes: a replay announces the first one as that of a graph does."""
        self._collectives = collectives

    def slot(self) -> SlotRecorder:
        """Return the recorder of a new slot."""
        return _RepeatingRecorder(self._collectives)

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Leave the stream as it is."""
        return contextlib.nullcontext()

    def drop(self, slots: Sequence[list[Any] | dict[Any, Any]]) -> None:
        """Empty these collections of slots."""
        _clear(slots)

    def reserved_bytes(self) -> int:
        """Return 0: memory is not counted here."""
        return 0


def _clear(slots: Sequence[list[Any] | dict[Any, Any]]) -> None:
    for each in slots:
        each.clear()


class _RepeatingRecorder:
    def __init__(self, collectives: PassCollectives | None) -> None:
        self._collectives = collectives

    def record(self, compute: Compute, transfers: BucketTransfers | None = None) -> "_RepeatingRecording":
        return _RepeatingRecording(compute, self._collectives, transfers)

    @torch.no_grad()
    def spoil(self, tensors: Tensors) -> None:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


class _RepeatingRecording:
    def __init__(
        self, compute: Compute, collectives: PassCollectives | None, transfers: BucketTransfers | None
    ) -> None:
        self._compute = compute
        self._collectives = collectives
        self._transfers = transfers
        self._span: CollectiveSpan | None = None
        """The span of the first replay, in the place of the one that a capture would have got."""
        self._results: Tensors | None = None

    @torch.no_grad()
    def replay(self) -> Tensors:
        with contextlib.ExitStack() as stack:
            if self._collectives is not None:
                stack.enter_context(self._collectives.recording(self._isolate))
            if self._transfers is not None:
                stack.enter_context(self._transfers.postponed(lambda call: call()))
            found = self._compute()
        if self._results is None:
            self._results = tuple(result.clone() for result in found)
        for own, result in zip(self._results, found, strict=True):
            own.copy_(result)
        return self._results

    def _isolate(self, call: Callable[[], Any], span: CollectiveSpan) -> Any:  # noqa: ANN401 - of the collective
        self._span = self._span or span
        results = []
        self._span(lambda: results.append(call()))
        return results[0]
