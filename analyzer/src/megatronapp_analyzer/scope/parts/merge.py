"""Merges the parts of a step, for any layout of the model. Pure.

A tensor of a shard names the rows, layers and heads (or features) of the whole model that it has. All are copied into
one table: what several ranks have (replicated tensors, key heads of grouped queries) is taken from the lowest tensor
rank.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.shard_merge import MAX_NUMBERS, ShardState, combined
from megatronapp_common.errors import FrameError
from megatronapp_common.filters.shard import MERGE, Shard
from megatronapp_common.filters.shard import parse_shard as read_shard
from megatronapp_common.filters.shard_plan import ReductionPlan
from megatronapp_common.frames import Frame
from megatronapp_common.scope.codes import TensorCode, decode
from megatronapp_common.scope.protocol import Tensor, unpack

Row = tuple[int, int]
"""Sample and position."""
Span = tuple[int, int]
"""First and end of heads or features."""
MAX_ROWS = 1 << 20
PCA = "pca"
"""Name of the tensor of coordinates."""
APART = frozenset({"attention", "atlas"})
"""Tensors that are no tables of rows and layers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardTensor:
    """A tensor of one rank: axes are rows, layers (where the site has some), then the sharded axis."""

    rows: tuple[Row, ...]
    layers: tuple[int, ...] | None
    span: Span | None
    """None: not sharded."""
    tp: int
    tensor: Tensor
    version: int | None = None
    """Version of the basis of coordinates; None for other tensors."""
    shard: Shard | None = None
    """The shard, if these are states that must be merged to numbers first. It has no span."""

    @property
    def axis(self) -> int:
        """Return the axis that may be sharded."""
        return 1 if self.layers is None else 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MergedTensor:
    """One tensor of the whole model; `layers` and `spans` describe its axes."""

    rows: tuple[Row, ...]
    layers: tuple[int, ...] | None
    spans: tuple[Span, ...]
    data: NDArray[Any]


def _integers(value: object, what: str, *, at_most: int = 1 << 20) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > at_most:
        raise ProtocolError("bad-part", f"PART frame: {what} is not a list of at most {at_most}")
    if not all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 32 for number in value):
        raise ProtocolError("bad-part", f"PART frame: {what} must be whole numbers from 0 to 2^32 - 1")
    return tuple(value)


def rows_of(value: object) -> tuple[Row, ...]:
    """Rows of `[[sample, first position, count], ..]`. Raises ProtocolError."""
    if not isinstance(value, list):
        raise ProtocolError("bad-part", "PART frame: rows is not a list")
    ranges = [_integers(row_range, "a range of rows", at_most=3) for row_range in value]
    if any(len(row_range) != 3 for row_range in ranges) or sum(row_range[2] for row_range in ranges) > MAX_ROWS:
        raise ProtocolError("bad-part", f"PART frame: rows are not [sample, first, count] of at most {MAX_ROWS} rows")
    return tuple((sample, first + place) for sample, first, count in ranges for place in range(count))


def shard_tensors_of(frame: Frame, tp: int) -> list[ShardTensor]:
    """Return the tensors of a PART frame. Raises ProtocolError."""
    rows, version = rows_of(frame.header.get("rows")), _version(frame.header.get("pcaVersion"))
    try:
        found = [_shard_tensor(tensor, rows, tp) for tensor in unpack(frame)]
    except FrameError as error:
        raise ProtocolError("bad-part", f"PART frame: {error}") from error
    return [dataclasses.replace(part, version=version) if part.tensor.name == PCA else part for part in found]


def _version(value: object) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 53):
        raise ProtocolError("bad-part", "PART frame: pcaVersion is not a whole number from 0 on")
    return value


def _shard_tensor(tensor: Tensor, rows: tuple[Row, ...], tp: int) -> ShardTensor:
    said = tensor.extra
    layers = None if said.get("layers") is None else _integers(said["layers"], "layers")
    span = said.get("heads") or said.get("features")
    shard = None if said.get(MERGE) is None else read_shard(said[MERGE])
    whole = span is None or bool(said.get("replicated")) or shard is not None
    span = None if whole else _span(span)
    piece = ShardTensor(rows=rows, layers=layers, span=span, tp=tp, tensor=tensor, shard=shard)
    _check(piece)
    return piece


def _span(value: object) -> Span:
    ends = _integers(value, "heads or features", at_most=2)
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise ProtocolError("bad-part", f"PART frame: {value} is not [first, end]")
    return ends[0], ends[1]


def _check(piece: ShardTensor) -> None:
    """Raise ProtocolError if the shape is not what the header describes."""
    shape, name = piece.tensor.data.shape, piece.tensor.name
    if name == "atlas":
        fits = piece.layers is not None and len(shape) == 4 and shape[0] == len(piece.layers)
    else:
        expected = (len(piece.rows),) if piece.layers is None else (len(piece.rows), len(piece.layers))
        fits = shape[: len(expected)] == expected
    fits &= piece.shard is None or _holds_states(piece, piece.shard)
    if not fits or (piece.span is not None and name != "atlas" and len(shape) <= piece.axis):
        raise ProtocolError("bad-part", f"PART frame: tensor {name[:64]!r} has the shape {shape}, not what is said")


def _holds_states(piece: ShardTensor, shard: Shard) -> bool:
    tensor = piece.tensor
    is_row = tensor.data.shape[piece.axis :] == (shard.plan.columns,)
    return is_row and tensor.code == "f32" and tensor.name not in APART


def merge(pieces: Sequence[ShardTensor], *, layers: int | None = None) -> MergedTensor:
    """Merge all tensors of one name into one table. With `layers` it has that many layers.

    What no rank sent is NaN, or 0 in codes of whole numbers. Raises ProtocolError if the tensors do not fit together.
    """
    return merge_all({"": pieces}, layers=layers)[""]


def merge_all(named: Mapping[str, Sequence[ShardTensor]], *, layers: int | None = None) -> dict[str, MergedTensor]:
    """Return the table of each name, as `merge` makes it. Raises ProtocolError, also for too many states in total."""
    wholes = {name: _wholes(pieces) for name, pieces in named.items() if any(part.shard is not None for part in pieces)}
    if sum(whole.numbers(layers) for found in wholes.values() for whole in found) > MAX_NUMBERS:
        raise ProtocolError("bad-part", f"PART frame: the states of a step are more than {MAX_NUMBERS} numbers")
    done = {name: [whole.merged() for whole in found] for name, found in wholes.items()}
    return {name: _table(done.get(name, pieces), layers) for name, pieces in named.items()}


def _table(pieces: Sequence[ShardTensor], layers: int | None) -> MergedTensor:
    first = pieces[0]
    rows = tuple(sorted({row for piece in pieces for row in piece.rows}))
    known = None if first.layers is None else _layers(pieces, layers)
    columns, width = _columns(pieces)
    numbers = [_numbers(piece.tensor) for piece in pieces]
    shape = _shape(pieces, numbers, rows, known, width)
    data = np.full(shape, np.nan if numbers[0].dtype.kind == "f" else 0, numbers[0].dtype)
    table = MergedTensor(rows=rows, layers=known, spans=tuple(columns), data=data)
    for piece, values in sorted(zip(pieces, numbers, strict=True), key=lambda pair: -pair[0].tp):
        _paint(table, piece, values, columns)
    return table


def _wholes(pieces: Sequence[ShardTensor]) -> "list[_MergedStates]":
    """Group states of shards by plan: a capture that changes while prompts are read has several plans.

    Raises ProtocolError if they do not fit together.
    """
    name, groups = pieces[0].tensor.name, collections.defaultdict[ReductionPlan, list[ShardTensor]](list)
    for piece in pieces:
        if piece.shard is None or (piece.layers is None) != (pieces[0].layers is None):
            raise ProtocolError("bad-part", f"PART frame: parts of {name[:64]!r} do not fit each other")
        groups[piece.shard.plan].append(piece)
    return [_MergedStates(plan=plan, pieces=found) for plan, found in groups.items()]


class _MergedStates:
    """States of all shards for one plan. What two ranks sent is used once."""

    def __init__(self, *, plan: ReductionPlan, pieces: Sequence[ShardTensor]) -> None:
        self._plan = plan
        self._pieces = sorted(pieces, key=lambda part: -part.tp)
        self._rows = tuple(sorted({row for piece in pieces for row in piece.rows}))
        self._layers = None if pieces[0].layers is None else _layers(pieces, None)
        self._shape = len(self._rows), 1 if self._layers is None else len(self._layers)

    def numbers(self, layers: int | None) -> int:
        """Return the number of states of a table without gaps; with `layers`, of a table of that many layers."""
        rows, found = self._shape
        count = found if layers is None or self._layers is None else max(found, layers)
        return rows * count * self._plan.shards * self._plan.columns

    def merged(self) -> ShardTensor:
        """Return the numbers that a rank with the whole vector would have sent."""
        places = {row: place for place, row in enumerate(self._rows)}
        indices = {layer: place for place, layer in enumerate(self._layers or ())}
        data = combined(self._plan, [_shard_state(piece, places, indices) for piece in self._pieces], self._shape)
        last = self._pieces[-1]
        tensor = Tensor(last.tensor.name, "f32", data[:, 0] if self._layers is None else data)
        return ShardTensor(rows=self._rows, layers=self._layers, span=None, tp=last.tp, tensor=tensor)


def _shard_state(piece: ShardTensor, places: Mapping[Row, int], indices: Mapping[int, int]) -> ShardState:
    assert piece.shard is not None
    values = piece.tensor.data if piece.layers is not None else piece.tensor.data[:, None]
    return ShardState(
        shard=piece.shard.shard,
        rows=np.array([places[row] for row in piece.rows], dtype=np.intp),
        layers=np.array([indices[layer] for layer in piece.layers] if piece.layers is not None else [0], dtype=np.intp),
        values=values,
    )


def _numbers(tensor: Tensor) -> NDArray[Any]:
    """Return the numbers to merge: plain codes unchanged, `i8` decoded, because its scale is of one shard only."""
    if tensor.scales is None:
        return tensor.data
    return decode(TensorCode.I8, tensor.data, tensor.scales)


def _layers(pieces: Iterable[ShardTensor], count: int | None) -> tuple[int, ...]:
    found = sorted({layer for piece in pieces for layer in piece.layers or ()})
    if count is not None and found and found[-1] >= count:
        raise ProtocolError("bad-part", f"PART frame: layer {found[-1]} of a model of {count} layers")
    return tuple(found) if count is None else tuple(range(count))


def _columns(pieces: Iterable[ShardTensor]) -> tuple[dict[Span, int], int | None]:
    """Return where each span begins on the sharded axis, and its length; None if it is not sharded."""
    widths: dict[Span, int] = {}
    for piece in pieces:
        if piece.span is not None and widths.setdefault(piece.span, _width(piece)) != _width(piece):
            raise ProtocolError("bad-part", f"PART frame: {piece.tensor.name[:64]!r} has parts of different widths")
    places: dict[Span, int] = {}
    end = width = 0
    for span in sorted(widths):
        if span[0] < end:
            raise ProtocolError("bad-part", f"PART frame: spans of heads or features overlap at {span[0]}")
        places[span] = width
        end, width = span[1], width + widths[span]
    return places, width if places else None


def _width(piece: ShardTensor) -> int:
    return int(piece.tensor.data.shape[piece.axis])


def _shape(
    pieces: Sequence[ShardTensor],
    numbers: Sequence[NDArray[Any]],
    rows: Sequence[Row],
    layers: Sequence[int] | None,
    width: int | None,
) -> tuple[int, ...]:
    head = (len(rows),) if layers is None else (len(rows), len(layers))
    axis = pieces[0].axis
    tails = {values.shape[axis + 1 :] if width is not None else values.shape[axis:] for values in numbers}
    kinds = {(piece.layers is None, piece.span is None) for piece in pieces}
    if len(tails) != 1 or len(kinds) != 1 or len({values.dtype for values in numbers}) != 1:
        raise ProtocolError("bad-part", f"PART frame: parts of {pieces[0].tensor.name[:64]!r} do not fit each other")
    return (*head, *(() if width is None else (width,)), *tails.pop())


def _paint(table: MergedTensor, piece: ShardTensor, values: NDArray[Any], columns: Mapping[Span, int]) -> None:
    places = {row: place for place, row in enumerate(table.rows)}
    at: list[NDArray[np.intp]] = [np.array([places[row] for row in piece.rows], dtype=np.intp)]
    if piece.layers is not None:
        index = {layer: place for place, layer in enumerate(table.layers or ())}
        at.append(np.array([index[layer] for layer in piece.layers], dtype=np.intp))
    if piece.span is not None:
        first = columns[piece.span]
        at.append(np.arange(first, first + _width(piece), dtype=np.intp))
    table.data[np.ix_(*at)] = values
