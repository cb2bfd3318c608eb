"""Tensors that autograd saves in one forward pass of a model chunk: slots of its graph, and the memory they share.

Both roles learn it from one pass each, and compare. Parameters are on both sides already; every other memory that slots
have in common is one segment, which is shipped once.
"""

import bisect
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.graph.region_states import region_check

NO_SLOT = -1
"""Takes the place of a slot's number for a tensor that no backward pass needs."""
_LAYER = re.compile(r"\blayers\.\d+")


class SavedParameter(NamedTuple):
    """A slot that holds a parameter or a view of it."""

    module: str
    name: str
    offset: int
    """Elements from the start of the parameter."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedTensor(NamedTuple):
    """A slot that holds a tensor of the pass."""

    module: str
    """Innermost module that was running."""
    ordinal: int
    """Place among the tensors that the module has saved."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    segment: int
    offset: int
    """Bytes from the start of the segment."""


class SavedSegment(NamedTuple):
    """Memory that is shipped as one."""

    bytes: int
    group: int
    """Group of slots with which it is complete: one for each layer, and those before and after the layers."""
    on_host: bool = True
    """True for memory of the host. On a device a few slots are: fused attention keeps its seeds there."""


class SegmentMemory(NamedTuple):
    """Memory of a segment of one pass, at an address aligned for any dtype."""

    flat: torch.Tensor
    """Bytes in which the segment lies."""
    start: int = 0
    """Its first byte there."""


class SavedTensors(NamedTuple):
    """All slots of a chunk's graph, in the order in which a forward pass fills them."""

    slots: tuple[SavedParameter | SavedTensor, ...]
    groups: tuple[int, ...]
    """Group of each slot."""
    segments: tuple[SavedSegment, ...]

    def refuse_other(self, other: "SavedTensors", *, rank: int) -> None:
        """Raise TransferError that names the first slot in which the chunk of another rank differs.

        Its memory may be on another device.
        """
        for index, (own, theirs) in enumerate(zip(self.slots, other.slots, strict=False)):
            if own != theirs:
                raise TransferError(f"saved tensor {index}: here {own}, on rank {rank} {theirs}; both need one model")
        layouts = [
            (each.groups, [(segment.bytes, segment.group) for segment in each.segments]) for each in (self, other)
        ]
        if len(self.slots) != len(other.slots) or layouts[0] != layouts[1]:
            raise TransferError(
                f"{len(self.slots)} saved tensors here and {len(other.slots)} on rank {rank}; both need one model"
            )


class Parameters:
    """Parameters and buffers of a chunk by address."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._tensors = dict(chunk.named_parameters()) | dict(chunk.named_buffers())
        self._ranges = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + _bytes(tensor), name)
            for name, tensor in self._tensors.items()
            if tensor.numel()
        )
        self._starts = [start for start, _, _ in self._ranges]

    def find(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return the parameter that a tensor is a view of, and the view's offset in elements; None for any other."""
        place = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
        if not tensor.numel() or place < 0 or tensor.data_ptr() >= self._ranges[place][1]:
            return None
        start, _, name = self._ranges[place]
        return name.removeprefix("module."), (tensor.data_ptr() - start) // tensor.element_size()

    def of(self, slot: SavedParameter) -> torch.Tensor:
        """Return the parameter that a slot holds or views."""
        tensor = self._tensors.get(slot.name)
        return self._tensors[f"module.{slot.name}"] if tensor is None else tensor

    def view(self, slot: SavedParameter) -> torch.Tensor:
        """Return a parameter as it is now, through the view of a slot."""
        parameter = self.of(slot).detach()
        return parameter.as_strided(slot.shape, slot.stride, parameter.storage_offset() + slot.offset)


class SlotCollector:
    """Collects the slots of one pass, and keeps what they hold until `finish`: memory used again would look shared."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._chunk = chunk
        self._parameters = Parameters(chunk)
        self._in_region = region_check()
        self._modules: list[str] = [""]
        self._layer: str | None = None
        """Layer that has begun last."""
        self._saved: list[tuple[str, torch.Tensor]] = []
        self._places: list[_Place] = []

    def pack(self, tensor: torch.Tensor) -> int:
        """Take a tensor that autograd saves; returns the number of its slot, or NO_SLOT."""
        if self._in_region():
            return NO_SLOT
        module = self._modules[-1]
        self._saved.append((module, tensor.detach()))
        self._places.append(_Place(self._layer, inside=_LAYER.search(module) is not None))
        return len(self._saved) - 1

    @contextlib.contextmanager
    def collecting(self, unpack: Callable[[int], torch.Tensor]) -> Iterator[None]:
        """Collect the slots of the pass that runs within the context."""
        handles = []
        for name, module in self._chunk.named_modules():
            handles.append(module.register_forward_pre_hook(self._pusher(name)))
            handles.append(module.register_forward_hook(self._pop, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self) -> SavedTensors:
        """Return the slots, and free the tensors that they hold."""
        groups = _groups(self._places)
        segments = _Segments()
        own: list[SavedParameter | tuple[str, torch.Tensor]] = []
        for group, (module, tensor) in zip(groups, self._saved, strict=True):
            found = self._parameters.find(tensor)
            if found is not None:
                own.append(SavedParameter(module, *found, tuple(tensor.shape), tensor.stride()))
            else:
                own.append((module, tensor))
                segments.add(tensor, group)
        segments.number()
        slots: list[SavedParameter | SavedTensor] = []
        ordinals: dict[str, int] = {}
        for entry in own:
            if isinstance(entry, SavedParameter):
                slots.append(entry)
                continue
            module, tensor = entry
            segment, offset = segments.place(tensor)
            ordinal = ordinals.get(module, 0)
            ordinals[module] = ordinal + 1
            shape, stride = tuple(tensor.shape), tensor.stride()
            slots.append(SavedTensor(module, ordinal, shape, stride, tensor.dtype, segment, offset))
        self._saved.clear()
        self._places.clear()
        return SavedTensors(tuple(slots), tuple(groups), tuple(segments.specs))

    def _pusher(self, name: str) -> Callable[..., None]:
        module = name.removeprefix("module").removeprefix(".")  # Float16Module wraps the model for bf16
        layer = _LAYER.search(name)

        def push(_module: Any, _arguments: Any) -> None:  # noqa: ANN401 - torch's
            self._modules.append(module)
            if layer is not None:
                self._layer = layer.group()

        return push

    def _pop(self, _module: Any, _arguments: Any, _output: Any) -> None:  # noqa: ANN401 - torch's
        self._modules.pop()


class _Segments:
    """Intervals of storages that tensors touch, merged where they overlap."""

    def __init__(self) -> None:
        self._found: dict[int, list[list[int]]] = {}
        self._on_host: set[int] = set()
        self._merged: dict[int, list[tuple[int, int, int]]] = {}
        self.specs: list[SavedSegment] = []

    def add(self, tensor: torch.Tensor, group: int) -> None:
        start, end = interval(tensor)
        self._found.setdefault(_storage(tensor), []).append([start, end, group])
        if tensor.device.type == "cpu":
            self._on_host.add(_storage(tensor))

    def number(self) -> None:
        """Merge what overlaps, and number the segments in the order in which they are complete."""
        merged: list[tuple[int, int, int, int]] = []
        for storage, found in self._found.items():
            joined: list[list[int]] = []
            for start, end, group in sorted(found):
                if joined and start < joined[-1][1]:
                    joined[-1][2] = max(joined[-1][2], group) if end > joined[-1][1] else joined[-1][2]
                    joined[-1][1] = max(joined[-1][1], end)
                else:
                    joined.append([start, end, group])
            merged += [(group, storage, start, end) for start, end, group in joined]
        merged.sort(key=lambda segment: segment[0])  # stable, so that each rank has the order of its passes
        for number, (group, storage, start, end) in enumerate(merged):
            self._merged.setdefault(storage, []).append((start, end, number))
            self.specs.append(SavedSegment(end - start, group, storage in self._on_host))

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the segment of a tensor and the tensor's offset in it, in bytes."""
        first, last = interval(tensor)
        for start, end, number in self._merged[_storage(tensor)]:
            if start <= first and last <= end:
                return number, first - start
        raise AssertionError("a saved tensor is in no segment")


def slot_view(segment: torch.Tensor, slot: SavedTensor) -> torch.Tensor:
    """Return the tensor of a slot in its segment, flat bytes that begin at an address aligned for any dtype."""
    view = torch.empty(0, dtype=slot.dtype, device=segment.device)
    start = (int(segment.storage_offset()) + slot.offset) // view.element_size()
    return view.set_(segment.untyped_storage(), start, slot.shape, slot.stride)


def interval(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage from the first to after the last element that a tensor has."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Place(NamedTuple):
    """Place of a slot in a pass. A recomputed layer saves its input after it has run, outside of its module."""

    layer: str | None
    """Layer that had begun last; None before the first one."""
    inside: bool
    """True for a slot that is filled in the layer."""


def _groups(places: list[_Place]) -> list[int]:
    """Number the groups of slots: a new one begins wherever the place is another."""
    changes = (place != before for before, place in itertools.pairwise(places))
    return list(itertools.accumulate(changes, initial=0))[: len(places)]
