"""Files of wire frames, of which the last frame may be incomplete where the hub was killed."""

import logging
import os
import pathlib
from collections.abc import Iterator

from megatronapp_common import frames
from megatronapp_common.errors import FrameError

LOG = logging.getLogger(__name__)


def read_frames(path: pathlib.Path) -> Iterator[frames.Frame]:
    """Yield the whole frames of a file; none if it is missing. Stops at an incomplete or garbled frame."""
    for frame, _ in whole_frames(path):
        yield frame


def whole_frames(path: pathlib.Path) -> Iterator[tuple[frames.Frame, int]]:
    """Yield the same frames, each with the offset of its end."""
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        return
    end = 0
    while len(data) - end >= frames.PREFIX.size:
        try:
            length = frames.frame_length(data[end:])
            if length > len(data) - end:
                return
            frame = frames.decode(data[end : end + length])
        except FrameError as error:
            LOG.warning("%s: the rest is skipped: %s", path, error)
            return
        end += length
        yield frame, end


def truncate_to(path: pathlib.Path, whole: int) -> None:
    """Truncate a file to its first `whole` bytes, and log it if there are more. Raises OSError."""
    if path.stat().st_size > whole:
        LOG.warning("%s: an incomplete frame after %d bytes is removed", path, whole)
        os.truncate(path, whole)


def truncate_to_frames(path: pathlib.Path) -> None:
    """Truncate a file to its whole frames: readers stop at the first other bytes. Raises OSError."""
    whole = 0
    for _, end in whole_frames(path):
        whole = end
    truncate_to(path, whole)
