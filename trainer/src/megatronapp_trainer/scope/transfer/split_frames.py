"""Numbers of some rows, cut into pieces that fit into frames. Pure.

All tensors of some rows share a frame if they fit. If a single row is too large, its tensors follow each other, cut
along their layers and then along heads or features; every row is cut alike, so that pieces of equal names tile.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.filters.shard import MERGE
from megatronapp_common.scope.protocol import Tensor

MOST_ROWS = 1 << 14
"""Most rows of a frame, since its header lists them."""
_ENTRY_BYTES = 256
"""About what a header says of a tensor, without its layers."""
_LAYER_BYTES = 5
_SHARD_AXES = ("heads", "features")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RowTensor:
    """One tensor: [rows, layers, ..], or [rows, ..] of sites without layers."""

    name: str
    code: str
    values: NDArray[Any]
    select: NDArray[np.intp] | None = None
    """Places of the rows in `values`; None: from the first on."""
    layers: tuple[int, ...] | None = None
    header: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_picture: bool = False
    """Its one row is no axis of the tensor in the frame."""

    @property
    def row_bytes(self) -> int:
        """About what one row takes in a frame."""
        return math.prod(self.values.shape[1:]) * self.values.itemsize + self._header_bytes

    @property
    def _header_bytes(self) -> int:
        return _ENTRY_BYTES + _LAYER_BYTES * len(self.layers or ())

    def chunks(self, limit: int) -> "Iterator[TensorChunk]":
        """Parts of a row, each within the limit where its layers, heads or features can be cut so."""
        available = max(1, limit - self._header_bytes)
        axis = 1 if self.layers is None else 2
        cell = self.values.shape[axis:]
        cell_bytes = math.prod(cell) * self.values.itemsize
        whole = slice(0, cell[0] if cell else 1)
        if cell_bytes <= available or not self._is_divisible(cell):
            for layers in _slices(len(self.layers or ()) or 1, available // max(1, cell_bytes)):
                yield TensorChunk(self, layers, whole, (layers.stop - layers.start) * cell_bytes + self._header_bytes)
            return
        unit = cell_bytes // cell[0]
        for layers in _slices(len(self.layers or ()) or 1, 1):
            for part in _slices(cell[0], available // unit):
                yield TensorChunk(self, layers, part, (part.stop - part.start) * unit + self._header_bytes)

    def _is_divisible(self, cell: Sequence[int]) -> bool:
        """Return false for pixels, each of which represents several heads or features, and for states."""
        if MERGE in self.header:
            return False
        span = next((self.header[axis] for axis in _SHARD_AXES if axis in self.header), None)
        return bool(cell) and (span is None or span[1] - span[0] == cell[0])

    def whole(self) -> "TensorChunk":
        """All of a row."""
        axis = 1 if self.layers is None else 2
        width = self.values.shape[axis] if self.values.ndim > axis else 1
        return TensorChunk(self, slice(0, len(self.layers or ()) or 1), slice(0, width), self.row_bytes)


class TensorChunk(NamedTuple):
    """A part of each row of a tensor."""

    tensor_source: RowTensor
    layers: slice
    """Places among the layers."""
    part: slice
    """Range on the axis after the layers."""
    row_bytes: int

    def tensor(self, rows: slice) -> Tensor:
        """These rows of it."""
        source = self.tensor_source
        values = source.values[rows] if source.select is None else source.values[source.select[rows]]
        if source.layers is not None:
            values = values[:, self.layers]
        axis = 1 if source.layers is None else 2
        is_partial = values.ndim > axis and self.part.stop - self.part.start < values.shape[axis]
        if is_partial:
            values = values[(*[slice(None)] * axis, self.part)]
        values = np.ascontiguousarray(values[0] if source.is_picture else values)
        return Tensor(source.name, source.code, values, None, self._header(is_partial=is_partial))

    def _header(self, *, is_partial: bool) -> dict[str, Any]:
        layers = {} if self.tensor_source.layers is None else {"layers": list(self.tensor_source.layers[self.layers])}
        header = {**layers, **self.tensor_source.header}
        if not is_partial:
            return header
        shard_axis = next((axis for axis in _SHARD_AXES if axis in header), "features")
        first = header[shard_axis][0] if shard_axis in header else 0
        return header | {shard_axis: [first + self.part.start, first + self.part.stop], "replicated": False}


class FrameContent(NamedTuple):
    """Rows and tensors of one frame."""

    rows: slice
    tensors: list[Tensor]
    is_last: bool


def split_into_frames(row_tensors: Sequence[RowTensor], count: int, limit: int) -> Iterator[FrameContent]:
    """Split `count` rows into frames of at most about `limit` bytes; at least one frame, which may be empty."""
    row_bytes = sum(tensor.row_bytes for tensor in row_tensors)
    groups = [[tensor.whole() for tensor in row_tensors]] if row_bytes <= limit else _groups(row_tensors, limit)
    at_once = max(1, min(MOST_ROWS, limit // max(1, row_bytes)))
    for rows in _slices(max(1, count), at_once):
        for place, group in enumerate(groups):
            is_last = rows.stop >= count and place == len(groups) - 1
            content_rows = slice(rows.start, min(rows.stop, count))
            yield FrameContent(content_rows, [part.tensor(content_rows) for part in group], is_last)


def _groups(row_tensors: Sequence[RowTensor], limit: int) -> list[list[TensorChunk]]:
    """Pieces of one row, as they go together."""
    groups: list[list[TensorChunk]] = []
    available = 0
    for part in (part for tensor in row_tensors for part in tensor.chunks(limit)):
        if part.row_bytes > available or not groups:
            groups.append([])
            available = limit
        groups[-1].append(part)
        available -= part.row_bytes
    return groups


def _slices(count: int, at_once: int) -> Iterator[slice]:
    for first in range(0, count, max(1, at_once)):
        yield slice(first, min(count, first + max(1, at_once)))
