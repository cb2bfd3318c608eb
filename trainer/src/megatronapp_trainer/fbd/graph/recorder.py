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
        self._groups: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(saved.groups, default=0))]
        for number, segment in enumerate(saved.segments):
            self._groups[segment.group].append((number, segment.bytes))

    @contextlib.contextmanager
    def recording(self, ship: ShipGroup) -> Iterator[list[RegionStates]]:
        """Ship what the pass within the context saves, group by group; yields the states of its checkpointed regions.

        Raises:
            TransferError: the pass saves other tensors than the one that was learned, or a tensor was changed in
                place after it was saved.
        """
        recorded = _RecordedPass(self._expected, self._groups, ship)
        states: list[RegionStates] = []
        with region_states_recorded(states), torch.autograd.graph.saved_tensors_hooks(recorded.pack, _refuse_backward):
            yield states
        recorded.finish()


class _ExpectedSlot(NamedTuple):
    """A slot of the first pass in the form that is compared fastest, as a pass has hundreds of them."""

    slot: SavedParameter | SavedTensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    group: int
    segment: int
    """-1 for a parameter."""
    offset: int
    """Bytes from the start of the segment; for a parameter the address of its view."""


def _expected_slot(slot: SavedParameter | SavedTensor, group: int, parameters: Parameters) -> _ExpectedSlot:
    if isinstance(slot, SavedParameter):
        return _ExpectedSlot(slot, slot.shape, slot.stride, group, -1, parameters.view(slot).data_ptr())
    return _ExpectedSlot(slot, slot.shape, slot.stride, group, slot.segment, slot.offset)


class _RecordedPass:
    def __init__(self, expected: list[_ExpectedSlot], groups: list[list[tuple[int, int]]], ship: ShipGroup) -> None:
        self._expected = expected
        self._groups = groups
        """By group: numbers and bytes of its segments."""
        self._ship = ship
        self._in_region = region_check()
        self._group = 0
        self._next = 0
        self._addresses: dict[int, int] = {}
        """Addresses of the segments that have been seen, and are not shipped yet."""
        self._saved: dict[int, list[tuple[torch.Tensor, int]]] = {}
        """Tensors of each of them, which keep its memory, and their versions when they were saved."""

    def pack(self, tensor: torch.Tensor) -> int:
        if self._in_region():
            return NO_SLOT
        number = self._next
        self._next += 1
        if number >= len(self._expected):
            raise TransferError(f"a pass has saved more than the {len(self._expected)} tensors of the first pass")
        slot, shape, stride, group, segment, offset = self._expected[number]
        while self._group < group:
            self._ship_group()
        if tensor.shape != shape or tensor.stride() != stride:
            raise TransferError(
                f"saved tensor {number} of a pass is {tuple(tensor.shape)} with strides {tensor.stride()}, and was "
                f"{slot} in the first pass"
            )
        if segment < 0:
            if tensor.data_ptr() != offset:
                raise TransferError(f"saved tensor {number} of a pass is no parameter, and was {slot} in the first one")
            return number
        address = tensor.data_ptr() - offset
        if self._addresses.setdefault(segment, address) != address and tensor.numel():
            raise TransferError(f"saved tensor {number} ({slot}) shares no memory with those it did in the first pass")
        self._saved.setdefault(segment, []).append((tensor, tensor._version))
        return number

    def finish(self) -> None:
        if self._next != len(self._expected):
            raise TransferError(
                f"a pass has saved {self._next} tensors, and the first pass {len(self._expected)}; shapes must not "
                "change"
            )
        while self._group < len(self._groups):
            self._ship_group()

    def _ship_group(self) -> None:
        segments = []
        for number, size in self._groups[self._group]:
            saved = self._saved.pop(number)
            for tensor, version in saved:
                if tensor._version != version:
                    raise TransferError(
                        f"a tensor of {tuple(tensor.shape)} was changed in place after it was saved; use a new tensor"
                    )
            segments.append(RecordedSegment(self._addresses.pop(number), size, saved[0][0]))
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
