"""Codec of frames: decoding returns what was encoded, and bytes that are no frame give FrameError, no other error."""

import contextlib
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import PREFIX, Frame, FrameType

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
headers = st.dictionaries(st.text(max_size=12), values, max_size=6)
any_frame = st.builds(Frame, st.integers(0, 255), headers, st.binary(max_size=64))


@given(any_frame)
def test_a_frame_survives_encoding_and_decoding(frame: Frame) -> None:
    data = frames.encode(frame)
    assert len(data) % 8 == 0
    assert frames.frame_length(data) == len(data)
    back = frames.decode(data)
    assert (back.type, dict(back.header), bytes(back.body)) == (frame.type, dict(frame.header), frame.body)


@given(any_frame)
def test_the_body_starts_at_a_multiple_of_8(frame: Frame) -> None:
    data = frames.encode(frame)
    _, _, _, _, header, body = PREFIX.unpack_from(data, 0)
    start = PREFIX.size + -(-header // 8) * 8
    assert data[start : start + body] == frame.body
    assert not any(data[start + body :]), "padding is zero"


@given(st.lists(any_frame, max_size=5))
def test_frames_back_to_back_are_split(many: list[Frame]) -> None:
    data = b"".join(map(frames.encode, many))
    assert [(frame.type, bytes(frame.body)) for frame in frames.split(data)] == [
        (frame.type, frame.body) for frame in many
    ]


@given(any_frame, st.data())
def test_changed_bytes_give_a_frame_or_a_frame_error(frame: Frame, data: st.DataObject) -> None:
    changed = bytearray(frames.encode(frame))
    for _ in range(data.draw(st.integers(1, 6))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(changed)))
    for candidate in (bytes(changed), bytes(changed[:end]), bytes(changed) + bytes(changed[:end])):
        with contextlib.suppress(FrameError):
            frames.decode(candidate)
        with contextlib.suppress(FrameError):
            list(frames.split(candidate))


@given(st.binary(max_size=80))
def test_any_header_gives_a_frame_or_a_frame_error(header: bytes) -> None:
    padded = header + bytes(-len(header) % 8)
    data = PREFIX.pack(PREFIX.size + len(padded), frames.VERSION, 1, 0, len(header), 0) + padded
    with contextlib.suppress(FrameError):
        assert isinstance(frames.decode(data).header, dict)


@given(st.binary(max_size=80))
def test_any_bytes_give_a_frame_or_a_frame_error(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        frames.decode(data)


def prefixed(header: bytes) -> bytes:
    padded = header + bytes(-len(header) % 8)
    return PREFIX.pack(PREFIX.size + len(padded), frames.VERSION, 1, 0, len(header), 0) + padded


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({b"a": 2}),
        b"\x81\x90\x01",  # a list as a key
        b"\x81\xa1\xff\x01",  # a key that is no UTF-8
        b"\x91" * 5000,  # nested too deeply
        b"\xdf\xff\xff\xff\xff",  # a map that says it has 4 billion keys
        b"\xd6\xff" + b"\xff" * 3,  # a time stamp that ends early
        b"\x81\xa1a\xd7\xff" + b"\xff" * 8,  # a time stamp with too many nanoseconds
    ],
)
def test_headers_that_are_refused(header: bytes) -> None:
    with pytest.raises(FrameError):
        frames.decode(prefixed(header))


def test_a_frame_past_the_limit_is_refused_on_both_sides() -> None:
    body = bytes(frames.MAX_FRAME_BYTES)
    with pytest.raises(FrameError, match="send it in parts"):
        frames.encode(Frame(FrameType.RECORDS, {}, body))
    claimed = struct.pack("<IBBHII", frames.MAX_FRAME_BYTES + 24, 1, 1, 0, 1, frames.MAX_FRAME_BYTES)
    with pytest.raises(FrameError, match="lengths disagree"):
        frames.frame_length(claimed)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame(256, {}), "frame type 256 does not fit into a byte"),
        (Frame(-1, {}), "frame type -1 does not fit into a byte"),
        (Frame(1, {"a": object()}), "frame header cannot be packed"),
        (Frame(1, {"a": 2**64}), "frame header cannot be packed"),
    ],
)
def test_what_a_frame_cannot_represent_is_refused(frame: Frame, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        frames.encode(frame)


def test_an_array_is_sent_as_its_bytes() -> None:
    array: Any = np.arange(6, dtype="<f4").reshape(2, 3)
    back = frames.decode(frames.encode(Frame(FrameType.STEPS, {}, memoryview(array))))
    assert bytes(back.body) == array.tobytes()
