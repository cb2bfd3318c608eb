"""Session files: frames of one run back to back, as a page with endless credit would have got them, and exact numbers.

A file that ends in the middle, or is garbled, gives what stands before, and says where it stops.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from megatronapp_analyzer.errors import SessionError
from megatronapp_analyzer.hub.scope.run import HeadKey, Run, ValueKey
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import PREFIX, Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, frame_of

if TYPE_CHECKING:
    from megatronapp_analyzer.hub.scope.desk import ScopeDesk

ATTENTION_ROWS = 256
"""In one frame."""
BLOCK_BYTES = 8 << 20
"""Of exact numbers in one frame."""


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """What could be read. `broken` says where and why it ends early; None if it does not."""

    frames: list[Frame]
    broken: str | None


def dump(desk: "ScopeDesk", run: str) -> bytes:
    """The session of a run that the desk has."""
    return b"".join(pieces(desk, run))


def pieces(desk: "ScopeDesk", run: str) -> Iterator[bytes]:
    """The same, frame by frame. What the ring has let go of is not in it."""
    known = desk.runs[run]
    hello = desk.hello("viewer") | {"runs": [known.summary()]}
    yield frames.encode(Frame(FrameType.SCOPE_HELLO, hello))
    for entry in list(known.journal.after(0)):
        if (kept := entry.whole or entry.short) is not None:
            yield kept
    for frame in [*values_frames(known), *attention_frames(known)]:
        yield frames.encode(frame)


def values_frames(run: Run) -> Iterator[Frame]:
    """SCOPE_VALUES of everything that is held, in blocks of rows that follow each other and have one shape."""
    for key in sorted(run.values.keys(), key=str):
        rows = sorted(run.values.get(key).items())
        block: list[tuple[int, Any]] = []
        for position, row in rows:
            if block and not _goes_on(block, position, row):
                yield _values_frame(run.id, key, block)
                block = []
            block.append((position, row))
        if block:
            yield _values_frame(run.id, key, block)


def attention_frames(run: Run) -> Iterator[Frame]:
    """SCOPE_VALUES with codes (u8s) of attention rows that stand in no other frame: of prompts, and of probes."""
    capture = run.header.get("capture") or {}
    pinned = {(one["layer"], one["head"]) for one in capture.get("pinned", ())}
    for sample, layer, head in sorted(run.attention.keys()):
        end = len(run.prompt_ids(sample)) if (layer, head) in pinned else run.length(sample)
        exact = run.values.get(("attention", sample, layer, head))
        block: list[tuple[int, Any]] = []
        for position, row in sorted(run.attention.get((sample, layer, head)).items()):
            if position >= end or position in exact:
                continue
            if block and (position != block[-1][0] + 1 or len(block) == ATTENTION_ROWS):
                yield _attention_frame(run.id, (sample, layer, head), block)
                block = []
            block.append((position, row))
        if block:
            yield _attention_frame(run.id, (sample, layer, head), block)


def _attention_frame(run: str, key: HeadKey, block: list[tuple[int, Any]]) -> Frame:
    sample, layer, head = key
    rows = np.zeros((len(block), max(row.size for _, row in block)), np.uint8)
    for place, (_, row) in enumerate(block):
        rows[place, : row.size] = row
    header = {"run": run, "site": "attention", "sample": sample, "layer": layer, "head": head}
    return frame_of(
        FrameType.SCOPE_VALUES, header | {"rows": [block[0][0], len(block)]}, [Tensor("attention", "u8s", rows)]
    )


def _goes_on(block: list[tuple[int, Any]], position: int, row: Any) -> bool:  # noqa: ANN401
    last, shape = block[-1][0], block[-1][1].shape
    return position == last + 1 and row.shape == shape and (len(block) + 1) * row.nbytes <= BLOCK_BYTES


def _values_frame(run: str, key: ValueKey, block: list[tuple[int, Any]]) -> Frame:
    site, sample, layer, head = key
    rows = np.stack([row for _, row in block]).astype("<f4")
    header = {"run": run, "site": site, "sample": sample, "layer": layer, "head": head}
    return frame_of(FrameType.SCOPE_VALUES, header | {"rows": [block[0][0], len(block)]}, [Tensor(site, "f32", rows)])


def load(path: pathlib.Path) -> Session:
    """Read a file. Raises SessionError if nothing of it can be read, or it does not begin with HELLO."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SessionError(f"{path}: cannot be read: {error.strerror}; name a recorded session") from error
    session = parse(data)
    if not session.frames or session.frames[0].type != FrameType.SCOPE_HELLO:
        why = session.broken or "it does not begin with SCOPE_HELLO"
        raise SessionError(f"{path}: not a recorded session: {why}; take one that a hub's /session gave")
    return session


def parse(data: bytes) -> Session:
    """All frames, up to the first place that cannot be read."""
    found: list[Frame] = []
    place = 0
    view = memoryview(data)
    while place < len(data):
        try:
            length = frames.frame_length(view[place : place + PREFIX.size])
            found.append(frames.decode(view[place : place + length]))
        except FrameError as error:
            return Session(found, f"byte {place} of {len(data)}: {error}; {len(found)} frames before it were read")
        place += length
    return Session(found, None)
