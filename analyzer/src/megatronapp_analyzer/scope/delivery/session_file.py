"""Session files: all frames of one run, as a page with unlimited credit gets them, and exact numbers.

Of a file that is truncated or garbled all frames before that place are read, and the place is reported.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from megatronapp_analyzer.errors import SessionError
from megatronapp_analyzer.scope.delivery.viewer_feed import ViewerFeed
from megatronapp_analyzer.scope.store.run import ScopeRun, ValueKey, site_of
from megatronapp_analyzer.scope.store.tile_pooling import HeadKey
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import PREFIX, Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame

ATTENTION_ROWS = 256
"""Rows in one frame."""
BLOCK_BYTES = 8 << 20
"""Bytes of exact numbers in one frame."""
MAX_WORDS_BYTES = 1 << 10
"""Largest size of an ERROR frame at the end of a file."""
Block = list[tuple[int, Any]]
"""Positions and rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedSession:
    """The frames of a file. `broken` is where and why it ends early; None for a whole file."""

    frames: list[Frame]
    broken: str | None


def dump(feed: ViewerFeed, run: str) -> bytes:
    """Return the session of a run."""
    return b"".join(RunSnapshot(feed, feed.runs[run]).frames())


class RunSnapshot:
    """The frames of a run at this moment. It is made on the event loop; `frames` may run in a thread while the run
    continues."""

    def __init__(self, feed: ViewerFeed, run: ScopeRun) -> None:
        self._run = run.id
        self._hello = feed.hello("viewer") | {"runs": [run.summary()]}
        self._frames = [kept for entry in run.journal.after(0) if (kept := entry.whole or entry.short) is not None]
        self._values = {key: dict(run.values.get(key)) for key in run.values.stored_keys()}
        self._analyses = run.analyses.stored()
        self._attention = {key: _needed(run, key) for key in run.attention.stored_keys()}

    def frames(self) -> Iterator[bytes]:
        """Yield the session, frame by frame. Frames that are no longer stored are missing."""
        yield frames.encode(Frame(FrameType.SCOPE_HELLO, self._hello))
        told: set[tuple[int, ...]] = set()
        for data in self._frames:
            told.update(_rows_of(data))
            yield data
        for key in sorted(self._values, key=str):
            for block in _blocks(self._values[key], _continues_block):
                yield frames.encode(_values_frame(self._run, key, block))
        yield from self._analyses
        for head in sorted(self._attention):
            rows = {place: row for place, row in self._attention[head].items() if (*head, place) not in told}
            for block in _blocks(rows, _follows):
                yield frames.encode(_attention_frame(self._run, head, block))


def _needed(run: ScopeRun, key: HeadKey) -> dict[int, Any]:
    """Return rows of attention of tokens that were read, except those that follow from exact numbers."""
    sample, layer, head = key
    end, exact = run.length(sample), run.values.get(("attention", sample, layer, head))
    return {place: row for place, row in run.attention.get(key).items() if place < end and place not in exact}


def _rows_of(data: bytes) -> Iterator[tuple[int, ...]]:
    """Yield sample, layer, head and position of each row in a SCOPE_ROWS frame: heads may be pinned at any step."""
    if data[5] == FrameType.SCOPE_ROWS:
        yield from map(tuple, frames.decode(data).header["rows"])


def _blocks(rows: Mapping[int, Any], goes_on: Callable[[Block, int, Any], bool]) -> Iterator[Block]:
    """Yield rows in order, in blocks that `goes_on` joins."""
    block: Block = []
    for position, row in sorted(rows.items()):
        if block and not goes_on(block, position, row):
            yield block
            block = []
        block.append((position, row))
    if block:
        yield block


def _follows(block: Block, position: int, row: Any) -> bool:  # noqa: ANN401
    return position == block[-1][0] + 1 and len(block) < ATTENTION_ROWS


def _attention_frame(run: str, key: HeadKey, block: Block) -> Frame:
    sample, layer, head = key
    rows = np.zeros((len(block), max(row.size for _, row in block)), np.uint8)
    for place, (_, row) in enumerate(block):
        rows[place, : row.size] = row
    header = {"run": run, "site": "attention", "sample": sample, "layer": layer, "head": head}
    return build_frame(
        FrameType.SCOPE_VALUES, header | {"rows": [block[0][0], len(block)]}, [Tensor("attention", "u8s", rows)]
    )


def _continues_block(block: Block, position: int, row: Any) -> bool:  # noqa: ANN401
    last, shape = block[-1][0], block[-1][1].shape
    return position == last + 1 and row.shape == shape and (len(block) + 1) * row.nbytes <= BLOCK_BYTES


def _values_frame(run: str, key: ValueKey, block: Block) -> Frame:
    name, sample, layer, head = key
    site, rotary = site_of(name)
    rows = np.stack([row for _, row in block]).astype("<f4")
    header = {"run": run, "site": site, "sample": sample, "layer": layer, "head": head}
    header |= {} if rotary == "after" else {"rotary": rotary}
    return build_frame(
        FrameType.SCOPE_VALUES, header | {"rows": [block[0][0], len(block)]}, [Tensor(site, "f32", rows)]
    )


def load(path: pathlib.Path) -> RecordedSession:
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


def parse(data: bytes) -> RecordedSession:
    """Return all frames up to the first that cannot be read, or up to the ERROR that ended the download."""
    found: list[Frame] = []
    place, (end, words) = 0, _describe_truncation(data)
    view = memoryview(data)[:end]
    while place < end:
        try:
            length = frames.frame_length(view[place : place + PREFIX.size])
            found.append(frames.decode(view[place : place + length]))
        except FrameError as error:
            why = words or f"byte {place} of {end}: {error}"
            return RecordedSession(found, f"{why}; {len(found)} frames before it were read")
        place += length
    return RecordedSession(found, words and f"{words}; {len(found)} frames before it were read")


def _describe_truncation(data: bytes) -> tuple[int, str | None]:
    """Return where an ERROR frame at the end begins, and its text. It may interrupt the frame before it."""
    for size in range(PREFIX.size, min(MAX_WORDS_BYTES, len(data)) + 1, 8):
        with contextlib.suppress(FrameError):
            if frames.frame_length(data[-size:]) == size and data[5 - size] == FrameType.ERROR:
                header = frames.decode(data[-size:]).header
                return len(data) - size, f"{header.get('message')} ({header.get('hint')})"
    return len(data), None
