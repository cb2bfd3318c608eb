"""Numbers cut into frames: nothing is lost, nothing is too large, and what is joined again is the same bits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.scope.parts.merge import ShardTensor, merge, shard_tensors_of
from megatronapp_analyzer.scope.views.encode import attention_rows
from megatronapp_common.frames import Frame, FrameType, decode, encode
from megatronapp_common.scope.protocol import MAX_PART_BYTES, build_frame, unpack
from megatronapp_trainer.scope.transfer.device_copy import NamedTensor, PendingCopy, pack
from megatronapp_trainer.scope.transfer.frame_template import VERSION
from megatronapp_trainer.scope.transfer.part_frames import (
    ATLAS,
    EVERY,
    FrameSpec,
    StepFrames,
    TrackedRow,
    _frames,
    _whole,
)
from megatronapp_trainer.scope.transfer.publisher import DropPolicy
from megatronapp_trainer.scope.transfer.split_frames import RowTensor, split_into_frames

HEADER: dict[str, Any] = {"rank": 0, "run": "r", "step": 1, "timeUs": 0, "more": False}
SMALLEST = 1 << 10
"""Smallest limit of bytes of a part: the header's description of a tensor must fit, too."""


@st.composite
def sheets(draw: st.DrawFn, rows: int) -> list[RowTensor]:
    """Tensors with layers or without, of heads, features or neither."""
    found = []
    for place in range(draw(st.integers(1, 4))):
        layers = draw(st.one_of(st.none(), st.sets(st.integers(0, 90), min_size=1, max_size=9)))
        axis = draw(st.sampled_from(["heads", "features", ""]))
        width, tail = draw(st.integers(1, 60)), draw(st.sampled_from([(), (3,), (40,)]))
        first = draw(st.integers(0, 5)) if axis else 0
        shape = (rows, *(() if layers is None else (len(layers),)), width, *tail)
        values = np.random.default_rng(place).standard_normal(shape).astype("<f4")
        header = {"replicated": not axis} | ({axis: [first, first + width]} if axis else {})
        known = None if layers is None else tuple(sorted(layers))
        found.append(RowTensor(name=f"t{place}", code="f32", values=values, layers=known, header=header))
    return found


@given(st.data(), st.integers(0, 7), st.sampled_from([SMALLEST, 4 << 10, 64 << 10]))
@settings(max_examples=60, deadline=None)
def test_any_rows_layers_and_widths(data: st.DataObject, rows: int, limit: int) -> None:
    tensors = data.draw(sheets(rows))
    found = list(split_into_frames(tensors, rows, limit))
    assert [frame.is_last for frame in found] == [False] * (len(found) - 1) + [True]
    shards: dict[str, list[ShardTensor]] = {}
    for frame in found:
        assert sum(tensor.data.nbytes for tensor in frame.tensors) <= limit or _is_single_unit(frame.tensors)
        header = HEADER | {"rows": [[0, frame.rows.start, frame.rows.stop - frame.rows.start]]}
        for shard in shard_tensors_of(frame_again(header, frame.tensors), 0):
            shards.setdefault(shard.tensor.name, []).append(shard)
    for drawn in tensors:
        table = merge(shards[drawn.name])
        assert table.layers == drawn.layers
        assert table.data.tobytes() == drawn.values.tobytes()


def _is_single_unit(tensors: Sequence[Any]) -> bool:
    """One head or feature of one row and layer cannot be cut."""
    (tensor,) = tensors
    axis = 1 if "layers" not in tensor.extra else 2
    return bool(np.prod(tensor.data.shape[: axis + 1]) == 1)


def frame_again(header: dict[str, Any], tensors: Sequence[Any]) -> Frame:
    return decode(encode(build_frame(FrameType.SCOPE_PART, header, tensors)))


def parts_of(found: Sequence[NamedTensor], specs: Sequence[FrameSpec], **options: Any) -> StepFrames:
    packed = pack(found)
    return StepFrames(PendingCopy(packed, packed.flat.clone(), None, None), specs, **options)


def test_frames_of_a_large_probe_stay_under_the_limit_of_the_protocol() -> None:
    """32 layers of 65,536 wide numbers: 8 MiB a row."""
    values = torch.arange(2 * 32 * 65536, dtype=torch.float32).reshape(32, 2, 65536)
    found = NamedTensor(
        name="mlp1", values=values, layers=tuple(range(32)), header={"site": "mlp1", "replicated": True}
    )
    rows = [TrackedRow(token=place, sample=0, position=place + 5) for place in range(2)]
    header = {"rank": 0, "probe": "p", "timeUs": 0, "more": False}
    parts = parts_of([found], [FrameSpec(group=0, header=header, rows=rows, select=range(2), is_probe=True)])
    assert parts.kind is DropPolicy.PROBE and parts.nbytes == values.numel() * 4
    assert [mark.header["rows"] for mark in parts.marks()] == [[[0, 5, 2]]]
    sliced, more = [], []
    for frame in parts.build():
        data = encode(frame)
        assert len(data) <= MAX_PART_BYTES
        sliced += shard_tensors_of(decode(data), 0)
        more.append(frame.header["more"])
    assert more == [True] * (len(more) - 1) + [False] and len(more) > 4
    assert merge(sliced).data.tobytes() == values.transpose(0, 1).contiguous().numpy().tobytes()
    assert parts.marks() == []


def test_pinned_heads_and_atlases_of_long_texts_are_split_too() -> None:
    heads, keys, slots = 4, 3000, 3
    codes = torch.randint(0, 256, (heads, slots, keys), dtype=torch.uint8)
    cells = torch.randint(0, 256, (6, 4, 8, 8), dtype=torch.uint8)
    pinned = NamedTensor(name="pinned", values=codes, group=EVERY)
    header = {"site": "attention", "heads": [0, 4], "replicated": False}
    picture = NamedTensor(
        name=f"{ATLAS}r 2", values=cells, layers=tuple(range(6)), header=header, group=EVERY, has_rows=False
    )
    rows = [TrackedRow(token=2, sample=0, position=2000), TrackedRow(token=0, sample=1, position=10)]
    pins = [(place, 5, place) for place in range(heads)]
    step = FrameSpec(group=0, header=HEADER, rows=rows, select=[2, 0], pinned=pins)
    atlas = FrameSpec(
        group=0, header=HEADER | {"step": 0}, rows=[TrackedRow(token=0, sample=2, position=0)], atlas=f"{ATLAS}r 2"
    )
    frames = list(parts_of([pinned, picture], [step, atlas], part_bytes=3 << 10).build())
    assert all(len(encode(frame)) <= 4 << 10 for frame in frames) and len(frames) > 6
    shards = [shard for frame in frames for shard in shard_tensors_of(decode(encode(frame)), 0)]
    got = attention_rows([shard for shard in shards if shard.tensor.name == "attention"])
    assert len(got) == heads * len(rows)
    for sample, layer, head, position, found in got:
        slot = {0: 2, 1: 0}[sample]
        assert layer == 5
        assert np.array_equal(found, codes[head, slot, : position + 1].numpy())
    joined = np.zeros_like(cells.numpy())
    for shard in shards:
        if shard.tensor.name == "atlas":
            assert shard.rows == ((2, 0),) and shard.layers is not None and shard.span is not None
            joined[list(shard.layers), slice(*shard.span)] = shard.tensor.data
    assert np.array_equal(joined, cells.numpy())


def test_coordinates_name_their_basis_and_probes_have_separate_frames() -> None:
    values = torch.zeros(2, 3, 8)
    points = NamedTensor(name="pca", values=values, layers=(0, 1), header={"site": "residual", VERSION: 7}, group=0)
    other = NamedTensor(name="q", values=values, layers=(0, 1), header={"site": "q"}, group=1)
    rows = [TrackedRow(token=place, sample=0, position=place) for place in range(3)]
    specs = [
        FrameSpec(group=0, header=HEADER, rows=rows, select=range(3)),
        FrameSpec(group=1, header={"probe": "p", "more": True}, rows=rows, select=range(3), is_probe=True),
    ]
    first, second = parts_of([points, other], specs).split()
    assert (first.kind, second.kind) == (DropPolicy.STEP, DropPolicy.PROBE)
    (step,), (probe,) = first.build(), second.build()
    assert step.header["pcaVersion"] == 7 and "pcaVersion" not in step.header["tensors"][0]
    assert "pcaVersion" not in probe.header and probe.header["probe"] == "p"


@given(st.data(), st.integers(1, 5), st.integers(0, 2))
def test_a_frame_that_fits_is_equal_to_the_frame_that_would_be_split(data: st.DataObject, rows: int, idle: int) -> None:
    source, layers = np.random.default_rng(rows), (3, 4)
    widths = data.draw(st.lists(st.sampled_from([(), (1,), (3,), (2, 2)]), min_size=1, max_size=4))
    header = {"site": "q", VERSION: 7}
    found = [
        NamedTensor(
            name=f"t{place}", values=random_of(source, (2, rows + idle, *width)), layers=layers, header=header, group=0
        )
        for place, width in enumerate(widths)
    ]
    found += [NamedTensor(name="else", values=random_of(source, (rows + idle, 3)), group=1)]
    pinned = torch.arange(2 * (rows + idle) * 9, dtype=torch.uint8).view(2, -1, 9)
    found += [NamedTensor(name="pinned", values=pinned, group=EVERY)]
    spec = FrameSpec(
        group=data.draw(st.integers(0, 1)),
        header={"run": "r", "step": 4, "more": data.draw(st.booleans())},
        rows=[TrackedRow(token=place, sample=place, position=data.draw(st.integers(0, 8))) for place in range(rows)],
        select=range(rows),
        pinned=data.draw(st.sampled_from([(), ((1, 3, 0),), ((0, 3, 0), (1, 4, 2))])),
    )
    packed = pack(found)
    pending = PendingCopy(packed, packed.flat.clone(), None, None)
    arrays = [pair for pair in pending.open() if pair[0].group in {spec.group, EVERY}]
    whole = _whole(spec, pending, arrays, 1 << 20)
    assert whole is not None
    (sliced,) = _frames(spec, arrays, 1 << 20)
    assert {**whole.header, "tensors": ()} == {**sliced.header, "tensors": ()}
    ours, theirs = ({tensor.name + str(tensor.extra): tensor for tensor in unpack(frame)} for frame in (whole, sliced))
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor.data, theirs[name].data)
        assert (tensor.code, tensor.extra) == (theirs[name].code, theirs[name].extra)


def random_of(source: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(source.standard_normal(shape, dtype=np.float32))
