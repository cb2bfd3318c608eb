"""Reading of segments of the spool: all frames that can be read, also those after one that cannot."""

import dataclasses
import pathlib
import re

from megatronapp_analyzer.hub.ingest.spool import SpoolFrame
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType

ALIGNMENT = 8
_VERSION_AT = 4
"""Offset of a frame's version, which its type follows."""
_TYPES = bytes([FrameType.RECORDS, SpoolFrame.CLOCK])
_MARK = re.compile(re.escape(bytes([frames.VERSION])) + b"[" + re.escape(_TYPES) + rb"]\0\0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentContent:
    """Frames of a segment in their order, and the bytes between them that are no frames."""

    frames: list[Frame]
    size: int
    unreadable: int


def read_segment(path: pathlib.Path) -> SegmentContent:
    """Read a segment. Raises OSError.

    A frame whose content is malformed is skipped; after bytes that are no frame the next one is searched.
    """
    content = path.read_bytes()
    data = memoryview(content)
    found: list[Frame] = []
    unreadable = at = 0
    while at < len(data):
        frame, size = _frame_at(data[at:])
        if frame is not None:
            found.append(frame)
        elif not size:
            size = _next_frame(content, at) - at
        unreadable += 0 if frame is not None else size
        at += size
    return SegmentContent(frames=found, size=len(data), unreadable=unreadable)


def _frame_at(data: memoryview) -> tuple[Frame | None, int]:
    """Return the frame at the begin of some bytes and its size: no frame if it is malformed, 0 if its size is, too."""
    try:
        size = frames.frame_length(data)
    except FrameError:
        return None, 0
    if size > len(data):
        return None, 0
    try:
        return frames.decode(data[:size]), size
    except FrameError:
        return None, size


def _next_frame(content: bytes, at: int) -> int:
    """Return the place of the next frame after `at` that can be decoded; the end of the content without any."""
    for mark in _MARK.finditer(content, at + _VERSION_AT + 1):
        begin = mark.start() - _VERSION_AT
        if begin % ALIGNMENT == 0 and _frame_at(memoryview(content)[begin:])[0] is not None:
            return begin
    return len(content)
