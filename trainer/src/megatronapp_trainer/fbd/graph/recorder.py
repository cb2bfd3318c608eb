"""The forward side: what autograd saves in a pass leaves as soon as it is complete, and no graph remains."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import torch

from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.graph.region_states import RegionStates, region_check, region_states_recorded
from megatronapp_trainer.fbd.graph.saved_tensors import (
    NO_SLOT,
    Parameters,
    SavedParameter,
    SavedTensor,
    SavedTensors,
    SlotCollector,
)


class RecordedSegment(NamedTuple):
    """Memory of a pass that is shipped as one."""

    address: int
    bytes: int
    owner: torch.Tensor
    """A tensor on its storage."""

    def flat(self) -> torch.Tensor:
        """Return its bytes as a flat tensor."""
        storage = self.owner.untyped_storage()
        segment = torch.empty(0, dtype=torch.uint8, device=self.owner.device)
        return segment.set_(storage, self.address - storage.data_ptr(), (self.bytes,))  # type: ignore[call-overload, no-any-return]


ShipGroup = Callable[[int, list[RecordedSegment]], None]
"""Takes the number of a group and its segments."""


class ForwardRecorder:
    """Records the forward passes of one model chunk."""

    def __init__(self, chunk: torch.nn.Module, saved: SavedTensors) -> None:
        """Take what `learn_saved_tensors` returned for the chunk."""
        parameters = Parameters(chunk)
        self._expected = [
            _expected_slot(slot, group, parameters) for slot, group in zip(saved.slots, saved.groups, strict=True)
        ]
        self._groups: list[list[_ExpectedSegment]] = [[] for _ in range(1 + max(saved.groups, default=0))]
        for number, segment in enumerate(saved.segments):
            later = any(slot.segment == number and slot.group > segment.group for slot in self._expected)
            self._groups[segment.group].append(_ExpectedSegment(number, later))
        self._bytes = [segment.bytes for segment in saved.segments]

    @contextlib.contextmanager
    def recording(self, ship: ShipGroup) -> Iterator[list[RegionStates]]:
        """Ship what the pass within the context saves, group by group; yields the states of its checkpointed regions.

        Raises:
            TransferError: the pass saves other tensors than the one that was learned, or a tensor was changed in
                place after it was saved.
        """
        recorded = _RecordedPass(self._expected, self._groups, self._bytes, ship)
        states: list[RegionStates] = []
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(recorded.pack, _refuse_backward)
            with region_states_recorded(states), hooks:
                yield states
            recorded.finish()
        finally:
            recorded.clear()


class _ExpectedSlot(NamedTuple):
    """A slot of the first pass in the form that is compared fastest, as a pass has hundreds of them."""

    slot: SavedParameter | SavedTensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    group: int
    segment: int
    """-1 for a parameter."""
    offset: int
    """Bytes from the start of the segment."""
    address: int
    """Address of the view of a parameter; 0 for any other tensor."""


class _ExpectedSegment(NamedTuple):
    number: int
    has_later_slots: bool
    """True if slots of later groups have its memory, too."""


def _expected_slot(slot: SavedParameter | SavedTensor, group: int, parameters: Parameters) -> _ExpectedSlot:
    if isinstance(slot, SavedParameter):
        view = parameters.view(slot)
        return _ExpectedSlot(slot, slot.shape, slot.stride, view.dtype, group, -1, 0, view.data_ptr())
    return _ExpectedSlot(slot, slot.shape, slot.stride, slot.dtype, group, slot.segment, slot.offset, 0)


class _RecordedPass:
    def __init__(
        self,
        expected: list[_ExpectedSlot],
        groups: list[list[_ExpectedSegment]],
        segment_bytes: list[int],
        ship: ShipGroup,
    ) -> None:
        self._expected = expected
        self._groups = groups
        self._bytes = segment_bytes
        self._ship = ship
        self._in_region = region_check()
        self._group = 0
        self._next = 0
        self._segments: dict[int, RecordedSegment] = {}
        """Segments that have been seen and are not shipped, and those with later slots until the pass ends."""
        self._saved: dict[int, list[tuple[torch.Tensor, int]]] = {}
        """Tensors of each segment that is not shipped yet, and their versions when they were saved."""

    def pack(self, tensor: torch.Tensor) -> int:
        if self._in_region():
            return NO_SLOT
        number = self._next
        self._next += 1
        if number >= len(self._expected):
            raise TransferError(f"a pass has saved more than the {len(self._expected)} tensors of the first pass")
        slot, shape, stride, dtype, group, segment, offset, address = self._expected[number]
        while self._group < group:
            self._ship_group()
        if tensor.shape != shape or tensor.stride() != stride or tensor.dtype != dtype:
            raise TransferError(
                f"saved tensor {number} of a pass is {tuple(tensor.shape)} of {tensor.dtype} with strides "
                f"{tensor.stride()}, and was {slot} in the first pass"
            )
        if segment < 0:
            if tensor.data_ptr() != address:
                raise TransferError(f"saved tensor {number} of a pass is no parameter, and was {slot} in the first one")
            return number
        known = self._segments.get(segment)
        if known is None:
            known = self._segments[segment] = self._segment_of(tensor, number)
            self._saved[segment] = []
        elif tensor.data_ptr() - offset != known.address and tensor.numel():
            raise TransferError(f"saved tensor {number} ({slot}) shares no memory with those it did in the first pass")
        saved = self._saved.get(segment)
        if saved is not None:  # otherwise an earlier group has shipped it
            saved.append((tensor, tensor._version))
        return number

    def _segment_of(self, tensor: torch.Tensor, number: int) -> RecordedSegment:
        """Return the segment of a slot that is its first one. The owner has neither a graph nor another's storage."""
        expected = self._expected[number]
        address, size = tensor.data_ptr() - expected.offset, self._bytes[expected.segment]
        storage = tensor.untyped_storage()
        first = storage.data_ptr()
        if size and not first <= address <= address + size <= first + storage.nbytes():
            raise TransferError(
                f"saved tensor {number} ({expected.slot}) is in a storage of {storage.nbytes()} bytes, which has no "
                f"{size} bytes from {address - first} on, as it had in the first pass"
            )
        return RecordedSegment(address, size, tensor.detach())

    def finish(self) -> None:
        if self._next != len(self._expected):
            raise TransferError(
                f"a pass has saved {self._next} tensors, and the first pass {len(self._expected)}; shapes must not "
                "change"
            )
        while self._group < len(self._groups):
            self._ship_group()

    def clear(self) -> None:
        """Let all tensors go: those with a graph refer to this pass, by its hooks."""
        self._segments.clear()
        self._saved.clear()

    def _ship_group(self) -> None:
        segments = []
        for number, has_later_slots in self._groups[self._group]:
            for tensor, version in self._saved.pop(number):
                if tensor._version != version:
                    raise TransferError(
                        f"a tensor of {tuple(tensor.shape)} was changed in place after it was saved; use a new tensor"
                    )
            segments.append(self._segments[number] if has_later_slots else self._segments.pop(number))
        self._ship(self._group, segments)
        self._group += 1


def learn_saved_tensors(chunk: torch.nn.Module, run: Callable[[], object]) -> tuple[SavedTensors, list[RegionStates]]:
    """Return what a forward pass of the chunk saves, and the states of its checkpointed regions; `run` runs one."""
    collector = SlotCollector(chunk)
    states: list[RegionStates] = []
    with region_states_recorded(states), collector.collecting(_refuse_backward):
        run()
    return collector.finish(), states


def _refuse_backward(_slot: int) -> NoReturn:
    raise TransferError("a forward rank was asked to run backward")
