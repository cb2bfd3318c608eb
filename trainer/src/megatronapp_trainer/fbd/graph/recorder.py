"""The forward side: what autograd saves in a pass leaves as soon as it is complete, and no graph remains."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.graph.region_states import RegionStates, in_region, region_states_recorded
from megatronapp_trainer.fbd.graph.saved_tensors import (
    NO_SLOT,
    Parameters,
    SavedParameter,
    SavedTensors,
    SlotCollector,
    interval,
)

ShipGroup = Callable[[int, list[torch.Tensor]], None]
"""Takes the number of a group and its segments, each a flat tensor of bytes."""


class ForwardRecorder:
    """Records the forward passes of one model chunk."""

    def __init__(self, chunk: torch.nn.Module, saved: SavedTensors) -> None:
        """Take what `learn_saved_tensors` returned for the chunk."""
        self._parameters = Parameters(chunk)
        self._saved = saved
        self._group_segments: list[list[int]] = [[] for _ in range(1 + max(saved.groups, default=0))]
        for number, segment in enumerate(saved.segments):
            self._group_segments[segment.group].append(number)

    @contextlib.contextmanager
    def recording(self, ship: ShipGroup) -> Iterator[list[RegionStates]]:
        """Ship what the pass within the context saves, group by group; yields the states of its checkpointed regions.

        Raises:
            TransferError: the pass saves other tensors than the one that was learned, or a tensor was changed in
                place after it was saved.
        """
        recorded = _RecordedPass(self._parameters, self._saved, self._group_segments, ship)
        states: list[RegionStates] = []
        with region_states_recorded(states), torch.autograd.graph.saved_tensors_hooks(recorded.pack, _refuse_backward):
            yield states
        recorded.finish()


class _RecordedPass:
    def __init__(
        self, parameters: Parameters, saved: SavedTensors, group_segments: list[list[int]], ship: ShipGroup
    ) -> None:
        self._parameters = parameters
        self._saved = saved
        self._group_segments = group_segments
        self._ship = ship
        self._group = 0
        self._next = 0
        self._starts: dict[int, tuple[torch.Tensor, int]] = {}
        """By segment: a tensor on its storage, and the byte of that storage at which it begins."""
        self._versions: dict[int, list[tuple[torch.Tensor, int]]] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        if in_region():
            return NO_SLOT
        number = self._next
        self._next += 1
        if number >= len(self._saved.slots):
            raise TransferError(f"a pass has saved more than the {len(self._saved.slots)} tensors of the first pass")
        group = self._saved.groups[number]
        while self._group < group:
            self._ship_group()
        slot = self._saved.slots[number]
        form = (tuple(tensor.shape), tensor.stride())
        if form != (slot.shape, slot.stride) or (isinstance(slot, SavedParameter) != self._is_parameter(tensor)):
            raise TransferError(f"saved tensor {number} of a pass is {form}, and was {slot} in the first pass")
        if isinstance(slot, SavedParameter):
            return number
        start = interval(tensor)[0] - slot.offset
        known, expected = self._starts.setdefault(slot.segment, (tensor.detach(), start))
        if tensor.numel() and (known.untyped_storage().data_ptr(), expected) != (
            tensor.untyped_storage().data_ptr(),
            start,
        ):
            raise TransferError(f"saved tensor {number} ({slot}) shares no memory with those it did in the first pass")
        self._versions.setdefault(slot.segment, []).append((tensor.detach(), tensor._version))
        return number

    def finish(self) -> None:
        if self._next != len(self._saved.slots):
            raise TransferError(
                f"a pass has saved {self._next} tensors, and the first pass {len(self._saved.slots)}; shapes must not "
                "change"
            )
        while self._group < len(self._group_segments):
            self._ship_group()

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return self._parameters.find(tensor) is not None

    def _ship_group(self) -> None:
        segments = [self._segment(number) for number in self._group_segments[self._group]]
        self._ship(self._group, segments)
        for number in self._group_segments[self._group]:
            del self._versions[number]
        self._group += 1

    def _segment(self, number: int) -> torch.Tensor:
        for tensor, version in self._versions[number]:
            if tensor._version != version:
                raise TransferError(
                    f"a tensor of {tuple(tensor.shape)} was changed in place after it was saved; use a new tensor"
                )
        tensor, start = self._starts[number]
        segment = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return segment.set_(tensor.untyped_storage(), start, (self._saved.segments[number].bytes,))  # type: ignore[call-overload, no-any-return]


def learn_saved_tensors(chunk: torch.nn.Module, run: Callable[[], object]) -> tuple[SavedTensors, list[RegionStates]]:
    """Return what a forward pass of the chunk saves, and the states of its checkpointed regions; `run` runs one."""
    collector = SlotCollector(chunk)
    states: list[RegionStates] = []
    with region_states_recorded(states), collector.collecting(_refuse_backward):
        run()
    return collector.finish(), states


def _refuse_backward(_slot: int) -> NoReturn:
    raise TransferError("a forward rank was asked to run backward")
