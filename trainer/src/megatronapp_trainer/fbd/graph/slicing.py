"""Division of what a pass of a whole model saves among the ranks of a tensor group.

With a merged forward one rank runs the model without tensor parallelism for all ranks of a tensor group. Its slots are
matched with those of a backward rank by module and ordinal, and each slot is divided as its two shapes say:

    equal                                  whole
    smaller by the ranks in one dimension  this rank's part of it: sequence, heads, channels, or vocabulary
    ids and masks of the vocabulary        made from the ids: a whole model has no range
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.graph.saved_tensors import SavedTensor, SavedTensors, slot_view

_VOCABULARY_MODULES = ("embedding.word_embeddings", "")
"""Modules that save ids of tokens: the embedding, and the cross entropy, which runs outside of any submodule."""
_FLAT_HEADS = "core_attention"
"""Module whose tensors of three dimensions may have microbatch and heads in the first one (megatron-core's)."""
_EXPERTS = (".experts", ".router", ".shared_experts")

Slot = tuple[str, int]
"""Module and ordinal."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """Place of a backward rank in its tensor group, and sizes that saved tensors do not show."""

    rank: int
    ranks: int
    micro_batch_size: int
    vocabulary: int
    """Tokens of the whole model, padding included."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks or self.vocabulary % self.ranks:
            raise TransferError(
                f"rank {self.rank} of {self.ranks} cannot have an equal part of {self.vocabulary} tokens; pad the "
                "vocabulary to a multiple of the tensor-parallel size"
            )


class Part(NamedTuple):
    """A rank's part of one dimension."""

    dimension: int
    blocks: int
    """Equal blocks that follow each other in the dimension, of each of which every rank has its part."""
    rank: int
    ranks: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor: a view, or a copy where blocks cannot be joined."""
        own = _part_of_blocks(tensor, self.dimension, self.blocks, self.rank, self.ranks)
        return own.flatten(self.dimension, self.dimension + 1)


class LocalIds(NamedTuple):
    """Ids as a rank counts them from its first token on; 0 for those of other ranks."""

    first: int
    end: int

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the local ids."""
        return (ids - self.first).masked_fill((ids < self.first) | (ids >= self.end), 0)


class ForeignIds(NamedTuple):
    """Mask of the ids that other ranks have."""

    first: int
    end: int

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a mask of the same shape."""
        return (ids < self.first) | (ids >= self.end)


SliceRule = Part | LocalIds | ForeignIds


class SlotSlice(NamedTuple):
    """How a slot of a backward rank is filled."""

    source: SavedTensor
    """Slot of the whole model."""
    rule: SliceRule | None
    """None: the whole tensor."""
    target: SavedTensor


class SourceRange(NamedTuple):
    """Bytes of the whole model that are a segment of a backward rank as they are."""

    segment: int
    """Place of the whole model's segment in the group."""
    offset: int
    """First byte in that segment."""


class PassSlicer:
    """Fills the segments of one backward rank from those of a pass of the whole model, group by group."""

    def __init__(self, whole: SavedTensors, part: SavedTensors, slices: Sequence[SlotSlice]) -> None:
        """Take the result of `slot_slices`."""
        self._first_segments = _first_segments(whole)
        self._slices: list[list[SlotSlice]] = [[] for _ in part.segments]
        for slot in slices:
            self._slices[slot.target.segment].append(slot)
        self._bytes = [segment.bytes for segment in part.segments]
        self._ranges = [
            _source_range(found, segment.bytes, whole, self._first_segments[segment.group])
            for found, segment in zip(self._slices, part.segments, strict=True)
        ]

    def source_range(self, number: int) -> SourceRange | None:
        """Return where a backward rank's segment lies as it is in the whole model's; None if it has to be filled."""
        return self._ranges[number]

    def fill(self, group: int, segment_of: Callable[[int], torch.Tensor], targets: Mapping[int, torch.Tensor]) -> None:
        """Fill segments of a group.

        Args:
            group: number of the group, the same on both sides.
            segment_of: returns a segment of the whole model's pass by its place in this group, as flat bytes.
            targets: flat bytes for the backward rank's segments that are filled, by number.
        """
        first = self._first_segments[group]
        for number, target in targets.items():
            if target.numel() != self._bytes[number]:
                raise TransferError(f"segment {number} has {self._bytes[number]} bytes, and room for {target.numel()}")
            for part in self._slices[number]:
                source = slot_view(segment_of(part.source.segment - first), part.source)
                _copy(slot_view(target, part.target), source if part.rule is None else part.rule.of(source))


def slot_slices(whole: SavedTensors, part: SavedTensors, place: TensorPlace) -> list[SlotSlice]:
    """Return how each slot of a backward rank is filled from a pass of the whole model.

    Slots that see the same memory in the same form are filled once.

    Raises:
        TransferError: a slot has no counterpart, or one of another form. Names the module and both shapes.
    """
    sources, targets = _by_slot(whole), _by_slot(part)
    slices = []
    matched: set[Slot] = set()
    filled = set()
    for key, target in targets.items():
        found = _ids_slice(key, target, sources, place) or _shape_slice(key, target, sources, place)
        matched.add((found.source.module, found.source.ordinal))
        if target.module in _VOCABULARY_MODULES:
            matched.add(key)
        memory = (target.segment, target.offset, target.shape, target.stride, target.dtype)
        if memory in filled:
            continue
        filled.add(memory)
        _refuse_other_group(whole, part, found)
        slices.append(found)
    for key in sources:
        if key not in matched:
            raise TransferError(
                f"the whole model saves {_described(sources[key])}, and rank {place.rank} of the tensor group saves "
                "nothing there; both need one model"
            )
    return slices


def weight_part(parameter: torch.nn.Parameter, rank: int, ranks: int) -> torch.Tensor:
    """Return the part of a whole model's parameter that a rank of a tensor group has: a view to write into.

    It has the elements of the rank's parameter in their order, and of a gated layer one dimension more: copy
    `own.view_as(part)`.
    """
    whole = parameter.detach()
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dimension: int = parameter.partition_dim  # type: ignore[attr-defined] # set by megatron-core
    blocks: int = parameter.partition_stride  # type: ignore[attr-defined]
    if whole.shape[dimension] % (blocks * ranks):
        raise TransferError(f"dimension {dimension} of {tuple(whole.shape)} has no {ranks} equal parts")
    own = _part_of_blocks(whole, dimension, blocks, rank, ranks)
    return own.squeeze(dimension) if blocks == 1 else own


def _ids_slice(
    key: Slot, target: SavedTensor, sources: dict[Slot, SavedTensor], place: TensorPlace
) -> SlotSlice | None:
    """Return how ids and masks of the vocabulary are made; None for any other slot."""
    module, _ = key
    if module not in _VOCABULARY_MODULES or target.dtype not in (torch.int64, torch.bool):
        return None
    ids = [slot for slot in sources.values() if slot.module == module and slot.dtype == torch.int64]
    if len(ids) != 1 or _elements(ids[0]) != _elements(target):
        raise TransferError(
            f"{_described(target)} of rank {place.rank} needs the ids of as many tokens, and the whole model saves "
            f"{', '.join(map(_described, ids)) or 'none'} there"
        )
    size = place.vocabulary // place.ranks
    limits = (place.rank * size, (place.rank + 1) * size)
    return SlotSlice(ids[0], LocalIds(*limits) if target.dtype == torch.int64 else ForeignIds(*limits), target)


def _shape_slice(key: Slot, target: SavedTensor, sources: dict[Slot, SavedTensor], place: TensorPlace) -> SlotSlice:
    source = sources.get(key)
    if source is None:
        raise TransferError(f"rank {place.rank} saves {_described(target)}, and the whole model nothing there")
    if any(expert in f".{source.module}" for expert in _EXPERTS):
        raise TransferError(f"{_described(source)} is of a mixture of experts, which a merged forward cannot serve")
    same_form = source.dtype == target.dtype and len(source.shape) == len(target.shape)
    pairs = enumerate(zip(source.shape, target.shape, strict=False))
    smaller = [dimension for dimension, (whole, part) in pairs if whole != part]
    if same_form and not smaller:
        return SlotSlice(source, None, target)
    if not same_form or len(smaller) > 1 or source.shape[smaller[0]] != target.shape[smaller[0]] * place.ranks:
        raise TransferError(
            f"the whole model saves {_described(source)}, and rank {place.rank} of {place.ranks} {_described(target)}: "
            "neither the same nor an equal part of one dimension"
        )
    flat_heads = source.module.endswith(_FLAT_HEADS) and len(source.shape) == 3 and smaller[0] == 0
    blocks = place.micro_batch_size if flat_heads else 1
    return SlotSlice(source, Part(smaller[0], blocks, place.rank, place.ranks), target)


def _source_range(
    slices: Sequence[SlotSlice], size: int, whole: SavedTensors, first_segment: int
) -> SourceRange | None:
    """Return the bytes of the whole model in which all slots of a segment lie as they are in the segment."""
    ranges = set()
    for part in slices:
        offset = _offset_in_source(part)
        ranges.add(None if offset is None else (part.source.segment, offset - part.target.offset))
    found = ranges.pop() if len(ranges) == 1 else None
    if found is None:
        return None
    segment, offset = found
    if offset < 0 or offset + size > whole.segments[segment].bytes:
        return None
    return SourceRange(segment - first_segment, offset)


def _offset_in_source(part: SlotSlice) -> int | None:
    """Return the byte of the whole model's segment at which a slot begins; None if its form there is another one."""
    source, target = part.source, part.target
    tensor = torch.empty_strided(source.shape, source.stride, dtype=source.dtype, device="meta")
    found = tensor
    if part.rule is not None:
        if not isinstance(part.rule, Part):
            return None
        found = part.rule.of(tensor)
        if found._base is not tensor:  # a copy
            return None
    # The stride of a dimension of one element says nothing.
    strides = zip(found.shape, found.stride(), target.stride, strict=True)
    if tuple(found.shape) != target.shape or any(own != theirs for size, own, theirs in strides if size > 1):
        return None
    return source.offset + int(found.storage_offset()) * source.dtype.itemsize


def _refuse_other_group(whole: SavedTensors, part: SavedTensors, found: SlotSlice) -> None:
    """Refuse a tensor that the whole model's pass ships before or after the rank's segment needs it."""
    there, here = whole.segments[found.source.segment].group, part.segments[found.target.segment].group
    if there != here:
        raise TransferError(
            f"{_described(found.source)} of the whole model is shipped with group {there}, and needed with group {here}"
        )


def _by_slot(saved: SavedTensors) -> dict[Slot, SavedTensor]:
    return {(slot.module, slot.ordinal): slot for slot in saved.slots if isinstance(slot, SavedTensor)}


def _first_segments(saved: SavedTensors) -> list[int]:
    """Return the number of the first segment of each group; segments are numbered in the order of groups."""
    groups = [segment.group for segment in saved.segments]
    return [sum(other < group for other in groups) for group in range(1 + max(saved.groups, default=0))]


def _part_of_blocks(tensor: torch.Tensor, dimension: int, blocks: int, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's part of each block of a dimension, which becomes two: blocks, and their parts."""
    size = tensor.shape[dimension] // blocks
    divided = tensor.view(*tensor.shape[:dimension], blocks, size, *tensor.shape[dimension + 1 :])
    return divided.narrow(dimension + 1, rank * (size // ranks), size // ranks)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor whose repeated elements are written once."""
    source = source.view(target.shape) if source.shape != target.shape else source
    for dimension, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dimension] > 1:
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    target.copy_(source)


def _elements(slot: SavedTensor) -> int:
    return torch.Size(slot.shape).numel()


def _described(slot: SavedTensor) -> str:
    return f"{list(slot.shape)} ({slot.dtype}, tensor {slot.ordinal} of {slot.module or 'the chunk itself'})"
