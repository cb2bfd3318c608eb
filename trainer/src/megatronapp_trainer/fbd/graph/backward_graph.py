"""The backward side: the graph of a model chunk, built once, that runs backward on the tensors of any pass."""

from collections.abc import Callable, Sequence

import torch

from megatronapp_trainer.errors import TaskOrderError
from megatronapp_trainer.fbd.graph.region_states import RegionStates, region_states_marked
from megatronapp_trainer.fbd.graph.saved_tensors import (
    NO_SLOT,
    Parameters,
    SavedParameter,
    SavedTensors,
    SegmentMemory,
    SlotCollector,
)


class BackwardGraph:
    """The autograd graph of a chunk, which keeps no tensor but parameters."""

    def __init__(
        self,
        chunk: torch.nn.Module,
        forward: Callable[[torch.Tensor | None], torch.Tensor],
        received: torch.Tensor | None,
    ) -> None:
        """Build the graph by one forward pass, the only one.

        Args:
            chunk: whose parameters get gradients.
            forward: runs the chunk on its input; returns the output.
            received: an input of the right shape, with any values; None for a chunk that reads its input from data.
        """
        self._received = None if received is None else received.detach().requires_grad_()
        self._parameters = Parameters(chunk)
        self._segments: Sequence[SegmentMemory] | None = None
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """Storages of the segments of the pass that runs, by their tensor's id and by dtype."""
        self._parameter_views: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """By slot: a parameter, its address, and the slot's view of it."""
        self._states: Sequence[RegionStates] = ()
        self.region_states: list[RegionStates] = []
        """States of the checkpointed regions of the first pass; those of other passes have the same form."""
        collector = SlotCollector(chunk)
        marked = region_states_marked(lambda number: self._states[number], self.region_states)
        with torch.enable_grad(), marked, collector.collecting(self._unpack):
            self._output = forward(self._received)
        self.saved: SavedTensors = collector.finish()

    def backward(
        self, segments: Sequence[SegmentMemory], states: Sequence[RegionStates], gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Run backward on what a pass has saved. Returns the gradient of the chunk's input; None where it has none.

        Args:
            segments: by number. They serve one backward pass, which may write into them.
            states: of the pass's checkpointed regions.
            gradient: of the chunk's output.
        """
        self._segments, self._states = segments, states
        try:
            torch.autograd.backward(self._output, gradient, retain_graph=True)
        finally:
            self._segments, self._states = None, ()
            self._typed.clear()
        if self._received is None:
            return None
        input_gradient, self._received.grad = self._received.grad, None
        return input_gradient

    def _unpack(self, number: int) -> torch.Tensor:
        if number == NO_SLOT:
            raise TaskOrderError("a backward pass needs a tensor of a recomputed region, of which nothing is shipped")
        slot = self.saved.slots[number]
        if isinstance(slot, SavedParameter):
            known = self._parameter_views.get(number)
            if known is None or known[0].data_ptr() != known[1]:  # given other memory
                parameter = self._parameters.of(slot)
                known = parameter, parameter.data_ptr(), self._parameters.view(slot)
                self._parameter_views[number] = known
            return known[2]
        if self._segments is None:
            raise TaskOrderError("a graph of a backward rank was run without the tensors of a pass")
        flat, start = self._segments[slot.segment]
        typed = self._typed.get((id(flat), slot.dtype))
        if typed is None:
            storage = flat.untyped_storage()
            typed = torch.empty(0, dtype=slot.dtype, device=flat.device)
            typed.set_(storage, 0, (storage.nbytes() // slot.dtype.itemsize,))  # type: ignore[call-overload]
            self._typed[id(flat), slot.dtype] = typed
        first = (int(flat.storage_offset()) + start + slot.offset) // slot.dtype.itemsize
        return typed.as_strided(slot.shape, slot.stride, first)
