"""Numbered frames of one run, as pages get them; some have a short form for pages without room for the whole. Pure."""

import bisect
import dataclasses
import enum
from collections.abc import Callable

from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget, RetentionClass
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType


class DropClass(enum.IntEnum):
    """Classes of frames that a slow page does not get, in the order in which they are dropped."""

    ROWS = 0
    VECTORS = 1
    NEVER = 2


CLASSES = {
    FrameType.SCOPE_ROWS: (DropClass.ROWS, RetentionClass.ROWS),
    FrameType.SCOPE_OVERVIEW: (DropClass.VECTORS, RetentionClass.VECTORS),
    FrameType.SCOPE_STEP: (DropClass.VECTORS, RetentionClass.VECTORS),
}
OF_TENSORS = frozenset({"topTexts", "pcaVersion"})
"""Header fields that mean nothing without the tensors."""
WHAT = {FrameType.SCOPE_ROWS: "rows", FrameType.SCOPE_OVERVIEW: "overview", FrameType.SCOPE_STEP: "step"}


@dataclasses.dataclass(eq=False, slots=True)
class LogEntry:
    """One frame. `whole` is None once its memory was needed; `short` is what must be sent anyway, if anything."""

    run: str
    seq: int
    type: int
    step: int
    whole: bytes | None
    short: bytes | None
    on_drop: Callable[[], None] | None = None
    """Called when `whole` is dropped, so that views on it are dropped, too."""

    @property
    def drop(self) -> DropClass:
        """Return the class in which the frame is dropped."""
        return CLASSES[FrameType(self.type)][0] if self.type in CLASSES else DropClass.NEVER

    @property
    def what(self) -> str:
        """Return the name of such frames in a GAP."""
        return WHAT[FrameType(self.type)]


class FrameLog:
    """Append-only log. Frames that may be dropped use the memory budget."""

    def __init__(self, run: str, ring: MemoryBudget) -> None:
        self.run = run
        self._ring = ring
        self._entries: list[LogEntry] = []
        self._tickets: list[int] = []
        self._newest_state: tuple[str, LogEntry] | None = None
        self._newest_pca: LogEntry | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def newest(self) -> int:
        """Return the number of the newest frame; 0 before the first."""
        return self._entries[-1].seq if self._entries else 0

    def append(self, frame: Frame) -> LogEntry:
        """Number a frame and store it. Raises FrameError."""
        seq = self.newest + 1
        step = frame.header.get("step", 0)
        return self.restore(Frame(frame.type, {**frame.header, "seq": seq}, frame.body), seq, step)

    def restore(self, frame: Frame, seq: int, step: int) -> LogEntry:
        """Store a frame that has its number already."""
        whole = frames.encode(frame)
        entry = LogEntry(self.run, seq, frame.type, step, whole, _short(frame, whole))
        if frame.type == FrameType.SCOPE_RUN:
            self._forget_same_state(str(frame.header.get("state")), entry)
        elif frame.type == FrameType.SCOPE_PCA:
            self._take_place_of(self._newest_pca)
            self._newest_pca = entry
        self._entries.append(entry)
        if frame.type in CLASSES:
            self._tickets.append(self._ring.hold(CLASSES[FrameType(frame.type)][1], len(whole), lambda: _let_go(entry)))
        return entry

    def _forget_same_state(self, state: str, entry: LogEntry) -> None:
        """Keep only the newest frame of a state, so that a long wait in the queue fills no memory."""
        if self._newest_state is not None and self._newest_state[0] == state:
            self._take_place_of(self._newest_state[1])
        self._newest_state = (state, entry)

    def _take_place_of(self, older: LogEntry | None) -> None:
        if older is not None:
            self._entries.remove(older)

    @property
    def pca(self) -> bytes | None:
        """Return the newest SCOPE_PCA: it has the coordinates of all rows, so that older ones are not sent again."""
        return self._newest_pca.whole if self._newest_pca is not None else None

    def steps(self) -> list[bytes]:
        """Return all SCOPE_STEP frames that are stored whole."""
        return [
            entry.whole for entry in self._entries if entry.type == FrameType.SCOPE_STEP and entry.whole is not None
        ]

    def after(self, seq: int) -> list[LogEntry]:
        """Return frames with a number above `seq`, oldest first."""
        return self._entries[bisect.bisect_right(self._entries, seq, key=lambda entry: entry.seq) :]

    def close(self) -> None:
        """Release all memory of the log."""
        for ticket in self._tickets:
            self._ring.release(ticket)
        self._entries.clear()


def _short(frame: Frame, whole: bytes) -> bytes | None:
    if frame.type == FrameType.SCOPE_STEP:
        header = {name: value for name, value in frame.header.items() if name not in OF_TENSORS}
        return frames.encode(Frame(frame.type, {**header, "tensors": []}))
    return None if frame.type in CLASSES else whole


def _let_go(entry: LogEntry) -> None:
    entry.whole = None
    if entry.on_drop is not None:
        entry.on_drop()
