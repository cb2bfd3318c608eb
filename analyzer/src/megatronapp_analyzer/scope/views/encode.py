"""Encodes a step for pages: numbers in compact codes, frames within the limit of a message. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.merge import APART, PCA, MergedTensor, Row, ShardTensor, merge_all
from megatronapp_analyzer.scope.parts.step_assembler import ClosedStep
from megatronapp_analyzer.scope.parts.wire_models import StepHeader, read
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.codes import TensorCode, encode
from megatronapp_common.scope.protocol import MAX_MESSAGE_BYTES, Tensor, build_frame, unpack

HEADER_BYTES = 16 << 10
"""Bytes of a message for header and padding."""
MAX_ATLAS_BYTES = 64 << 20
SIGNED = frozenset({"q", "k", "v", "mlp1", "mlp2"})
SHARES = frozenset({"head.entropy", "head.max", "head.sink"})
AttentionRow = tuple[int, int, int, int, NDArray[np.uint8]]
"""Sample, layer, head, position, and codes of all keys up to there."""


def tables_of(
    pieces: Sequence[ShardTensor], layers: int | None, *, apart: frozenset[str] = APART
) -> dict[str, MergedTensor]:
    """Merge tensors of shards to tables by name. Raises ProtocolError."""
    named: dict[str, list[ShardTensor]] = defaultdict(list)
    for piece in pieces:
        if piece.tensor.name not in apart:
            named[piece.tensor.name].append(piece)
    return merge_all(dict(sorted(named.items())), layers=layers)


def encode_tensor(name: str, data: NDArray[Any]) -> Tensor:
    """Encode numbers in the code that pages get them in."""
    if data.dtype == np.uint8:
        return Tensor(name, "u8", data)
    code = TensorCode.I8 if name in SIGNED else TensorCode.U8 if name in SHARES else TensorCode.F16
    found = encode(code, data)
    return Tensor(name, code.value, found.data, found.scales)


def select_rows(table: MergedTensor, rows: Sequence[Row]) -> NDArray[Any]:
    """Return rows of a table; missing ones are NaN, or 0."""
    places = {row: place for place, row in enumerate(table.rows)}
    out = np.full((len(rows), *table.data.shape[1:]), np.nan if table.data.dtype.kind == "f" else 0, table.data.dtype)
    for place, row in enumerate(rows):
        if row in places:
            out[place] = table.data[places[row]]
    return out


def step_frame(
    step: ClosedStep, tokens: Frame, tables: Mapping[str, MergedTensor], version: int
) -> tuple[Frame, list[str]]:
    """SCOPE_STEP, and the names of tensors that did not fit into a message, the largest first. Raises ProtocolError.

    `version`: of the basis of `pca`.
    """
    said = read(StepHeader, "TOKENS", tokens.header)
    try:
        sampled = unpack(tokens)
    except FrameError as error:
        raise ProtocolError("bad-tokens", f"TOKENS frame: {error}") from error
    tensors = sampled + [encode_tensor(name, select_rows(table, said.rows)) for name, table in tables.items()]
    room = MAX_MESSAGE_BYTES - HEADER_BYTES - sum(len(text) * 4 + 8 for row in said.top_texts or () for text in row)
    left_out: list[str] = []
    while tensors and sum(tensor.nbytes for tensor in tensors) > room:
        largest = max(tensors, key=lambda tensor: tensor.nbytes)
        tensors.remove(largest)
        left_out.append(largest.name)
    header = {"run": step.run, "step": step.step, **said.dump(), **_version(tables, version)}
    return build_frame(FrameType.SCOPE_STEP, header, tensors), left_out


def _version(tables: Mapping[str, MergedTensor], version: int) -> dict[str, int]:
    return {"pcaVersion": version} if PCA in tables else {}


def overview_frames(
    step: ClosedStep, tables: Mapping[str, MergedTensor], layers: int | None, version: int
) -> Iterator[Frame]:
    """SCOPE_OVERVIEW of every prompt of a prefill, each within a message. `version`: of the basis of `pca`."""
    atlases: dict[int, list[ShardTensor]] = defaultdict(list)
    for piece in step.tensors:
        if piece.tensor.name == "atlas" and piece.rows:
            atlases[piece.rows[0][0]].append(piece)
    samples = {row[0] for table in tables.values() for row in table.rows} | set(atlases)
    for sample in sorted(samples):
        atlas = [_atlas(atlases[sample], layers)] if atlases[sample] else []
        room = MAX_MESSAGE_BYTES - HEADER_BYTES - sum(tensor.nbytes for tensor in atlas)
        said = {"run": step.run, "sample": sample, **_version(tables, version)}
        yield _overview(said, tables, atlas, room)


def _overview(said: Mapping[str, Any], tables: Mapping[str, MergedTensor], atlas: list[Tensor], room: int) -> Frame:
    sample = said["sample"]
    positions = sorted({row[1] for table in tables.values() for row in table.rows if row[0] == sample})
    cost = sum(encode_tensor(name, table.data[:1]).nbytes for name, table in tables.items() if len(table.rows)) + 16
    every = max(1, -(-len(positions) // max(1, room // cost)))
    shown = positions[::every]
    rows = [(sample, position) for position in shown]
    tensors = [encode_tensor(name, select_rows(table, rows)) for name, table in tables.items()] if shown else []
    stride = shown[1] - shown[0] if len(shown) > 1 else 1
    header = {**said, "stride": stride, "positions": shown}
    return build_frame(FrameType.SCOPE_OVERVIEW, header, tensors + atlas)


def _atlas(pieces: Sequence[ShardTensor], layers: int | None) -> Tensor:
    """Merge thumbnails of all heads; with less resolution if a model has too many heads for a message."""
    known = layers or 1 + max(layer for piece in pieces for layer in piece.layers or (0,))
    heads = max(piece.span[1] if piece.span else piece.tensor.data.shape[1] for piece in pieces)
    cells = pieces[0].tensor.data.shape[2:]
    if known * heads * math.prod(cells) > MAX_ATLAS_BYTES:
        raise ProtocolError("bad-part", f"PART frame: an atlas of {known} layers and {heads} heads")
    data = np.zeros((known, heads, *cells), np.uint8)
    for piece in sorted(pieces, key=lambda shard_tensor: -shard_tensor.tp):
        first, end = piece.span or (0, heads)
        if piece.tensor.data.shape[1:] != (end - first, *cells) or max(piece.layers or (0,)) >= known:
            raise ProtocolError("bad-part", "PART frame: an atlas that does not fit the model")
        data[np.array(piece.layers or (0,)), first:end] = piece.tensor.data
    while data.nbytes > MAX_MESSAGE_BYTES * 3 // 4 and data.shape[-1] > 1:
        rows, columns = data.shape[2] // 2, data.shape[3] // 2
        data = data[:, :, : 2 * rows, : 2 * columns].reshape(known, heads, rows, 2, columns, 2).max(axis=(3, 5))
    return Tensor("atlas", "u8s", data)


def attention_rows(pieces: Sequence[ShardTensor]) -> list[AttentionRow]:
    """Return every row of attention, each up to its own position. Raises ProtocolError."""
    found: dict[tuple[int, int, int, int], NDArray[np.uint8]] = {}
    for piece in sorted(pieces, key=lambda shard_tensor: -shard_tensor.tp):
        if piece.tensor.name != "attention":
            continue
        data, layers = piece.tensor.data, piece.layers or ()
        if piece.tensor.code != "u8s" or data.ndim != 4:
            raise ProtocolError("bad-part", "PART frame: attention is not u8s of [rows, layers, heads, keys]")
        first = piece.span[0] if piece.span else 0
        for row, (sample, position) in enumerate(piece.rows):
            for place, layer in enumerate(layers):
                for head in range(data.shape[2]):
                    found[sample, layer, first + head, position] = data[row, place, head, : position + 1]
    return [(*key, found[key]) for key in sorted(found)]


def rows_frames(run: str, step: int, rows: Sequence[AttentionRow]) -> Iterator[Frame]:
    """SCOPE_ROWS, as many as messages are needed."""
    part: list[AttentionRow] = []
    size = 0
    for row in rows:
        if part and size + row[4].size + 16 > MAX_MESSAGE_BYTES - HEADER_BYTES:
            yield _rows_frame(run, step, part)
            part, size = [], 0
        part.append(row)
        size += row[4].size + 16
    if part:
        yield _rows_frame(run, step, part)


def _rows_frame(run: str, step: int, rows: Sequence[AttentionRow]) -> Frame:
    flat = np.concatenate([row[4] for row in rows]).astype(np.uint8)
    header = {"run": run, "step": step, "rows": [list(row[:4]) for row in rows], "keys": [row[4].size for row in rows]}
    return build_frame(FrameType.SCOPE_ROWS, header, [Tensor("attention", "u8s", flat)])
