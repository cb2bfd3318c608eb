"""Wire frames: the one codec between agent, hub and page.

Layout, little endian::

    0   u32  length of the whole frame in bytes, this field included; a multiple of 8
    4   u8   version (1); one minor release raises it by one at most, and reads the version before, too
    5   u8   type
    6   u16  reserved, 0
    8   u32  length of the header in bytes
    12  u32  length of the body in bytes
    16  ...  header: a msgpack map with text keys; zero padded to 8 bytes
    ...      body: raw bytes, starts at a multiple of 8; zero padded to 8 bytes

Vectors that every implementation must reproduce: tests/fixtures/wire/.
"""

import dataclasses
import enum
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

from megatronapp_common.errors import FrameError

VERSION = 1
PREFIX = struct.Struct("<IBBHII")
MAX_FRAME_BYTES = 64 << 20
MAX_TYPE = 255


class FrameType(enum.IntEnum):
    """Content of a frame. Numbers are part of the protocol: never reuse one."""

    HELLO = 1
    """agent -> hub: job, uid, attempt, worker, node, address, clocks."""
    WELCOME = 2
    """hub -> agent: accepted; which rings it has and up to which record."""
    RING = 3
    """agent -> hub: metadata of one ring (rank, coordinates, communicators, clock pairs)."""
    RECORDS = 4
    """agent -> hub: body is an array of trace records of one rank."""
    STATUS = 5
    """agent -> hub: heartbeat, open span, drops of every ring; progress document."""
    BYE = 6
    """agent -> hub: the worker ended; its outcome."""
    COMMAND = 7
    """hub -> agent: new content of the control document."""
    SNAPSHOT = 16
    """hub -> page: state of the job."""
    STEPS = 17
    """hub -> page: finished steps with per-rank columns."""
    METRICS = 18
    """hub -> page: new points of the curves."""
    VERDICTS = 19
    """hub -> page: all verdicts, whenever one changes."""
    ERROR = 31
    """either way: code and message; the sender closes afterwards."""
    SCOPE_PUBLISHER = 32
    """rank -> hub: which layers, heads and features it publishes."""
    SCOPE_PART = 33
    """rank -> hub: tensors of one step or probe, as far as this rank has them."""
    SCOPE_TOKENS = 34
    """sampling rank -> hub: tokens of a step and their candidates."""
    SCOPE_RUN_STATE = 35
    """rank 0 -> hub: state of a run."""
    SCOPE_LEFT = 36
    """agent -> hub: a rank's connection is over."""
    TRAINING_RANK = 37
    """rank -> hub: a rank of a training that captures statistics of layers."""
    TRAINING_STATISTICS = 38
    """rank -> hub: statistics of layers in one training step, as far as this rank has them."""
    TRAINING_PROBE = 39
    """rank -> hub: what a probe text gave after a training step, as far as this rank has it."""
    SCOPE_HELLO = 40
    """hub -> page: model, layout, limits, runs."""
    SCOPE_RUN = 41
    """hub -> page: state of a run."""
    SCOPE_STEP = 42
    """hub -> page: tokens of a step with their captures."""
    SCOPE_OVERVIEW = 43
    """hub -> page: a prompt after its prefill, in few rows."""
    SCOPE_ROWS = 44
    """hub -> page: new attention rows of the pinned heads."""
    SCOPE_GAP = 45
    """hub -> page: frames that were omitted, and why."""
    SCOPE_STATE = 46
    """hub -> page: state of the model and of its queue."""
    SCOPE_PCA = 47
    """hub -> page: a new basis, and the coordinates of the rows that it was fitted on."""
    SCOPE_VALUES = 48
    """session file only: exact numbers."""
    SCOPE_BASIS = 49
    """hub -> rank 0: the basis to project on."""
    SCOPE_TILES = 50
    """hub -> page, over HTTP: tiles of one attention map."""
    SCOPE_ANALYSIS = 56
    """rank 0 -> hub, over HTTP, and in session files: the result of an analysis."""


# Types 32-63 belong to MegaScope: docs/scope-protocol.md.


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame. `type` is a plain int so that a newer peer's types can be skipped."""

    type: int
    header: Mapping[str, Any]
    body: bytes | memoryview = b""


def _padded(length: int) -> int:
    return (length + 7) & ~7


def encode(frame: Frame) -> bytes:
    """Encode `frame`. Raises FrameError if it exceeds MAX_FRAME_BYTES or cannot be represented."""
    if not 0 <= frame.type <= MAX_TYPE:
        raise FrameError(f"frame type {frame.type} does not fit into a byte")
    try:
        header = msgpack.packb(dict(frame.header), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"frame header cannot be packed: {error}") from error
    body = frame.body if isinstance(frame.body, bytes) else frame.body.tobytes()
    total = PREFIX.size + _padded(len(header)) + _padded(len(body))
    if total > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {total} bytes passes the limit of {MAX_FRAME_BYTES}; send it in parts")
    out = bytearray(total)
    PREFIX.pack_into(out, 0, total, VERSION, frame.type, 0, len(header), len(body))
    out[PREFIX.size : PREFIX.size + len(header)] = header
    start = PREFIX.size + _padded(len(header))
    out[start : start + len(body)] = body
    return bytes(out)


def encode_error(code: str, message: str, hint: str = "") -> bytes:
    """Encode an ERROR frame: the last one of a connection, which says why it ends."""
    return encode(Frame(FrameType.ERROR, {"code": code, "message": message, "hint": hint}))


def accepts(version: object, newest: int) -> bool:
    """Return true if a peer of version `newest` reads this version: its own, and the one before.

    In an upgrade, agents of a running attempt continue unchanged with a newer hub.
    """
    return version in range(max(1, newest - 1), newest + 1)


def frame_length(prefix: bytes | memoryview) -> int:
    """Return the length in bytes of the frame that starts with `prefix` (at least 16 bytes). Raises FrameError."""
    if len(prefix) < PREFIX.size:
        raise FrameError(f"a frame starts with {PREFIX.size} bytes, got {len(prefix)}")
    total, version, _, _, header, body = PREFIX.unpack_from(prefix, 0)
    if not accepts(version, VERSION):
        raise FrameError(f"frame version {version} is not {VERSION}; use the same release on both sides")
    if total != PREFIX.size + _padded(header) + _padded(body) or total > MAX_FRAME_BYTES:
        raise FrameError(f"frame lengths disagree: total {total}, header {header}, body {body}")
    return int(total)


def decode(data: bytes | memoryview) -> Frame:
    """Decode `data`, which must hold exactly one frame. The body is a view, not a copy. Raises FrameError."""
    total = frame_length(data)
    if total != len(data):
        raise FrameError(f"frame says {total} bytes, got {len(data)}")
    _, _, kind, _, header_len, body_len = PREFIX.unpack_from(data, 0)
    view = memoryview(data)
    try:
        header = msgpack.unpackb(view[PREFIX.size : PREFIX.size + header_len], raw=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise FrameError(f"frame header is not msgpack: {error}") from error
    if not isinstance(header, dict) or not all(isinstance(key, str) for key in header):
        raise FrameError("frame header must be a map with text keys")
    start = PREFIX.size + _padded(header_len)
    return Frame(kind, header, view[start : start + body_len])


def split(data: bytes | memoryview) -> Iterator[Frame]:
    """Yield every frame of a byte string of consecutive whole frames. Raises FrameError."""
    view = memoryview(data)
    while view:
        length = frame_length(view)
        yield decode(view[:length])
        view = view[length:]
