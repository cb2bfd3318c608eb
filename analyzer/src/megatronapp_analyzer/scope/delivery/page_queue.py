"""Queue of frames for one page, within bounds. Frames are shared between pages, not copied.

A page grants bytes (credit) and grants them again once it has painted. Without credit, or with too much waiting, frames
are dropped: attention rows first, then vectors; tokens and states never. A GAP reports what was dropped.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable

from megatronapp_analyzer.scope.store.frame_log import DropClass, LogEntry
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import GRANTED_BYTES

MAX_WAITING_BYTES = 8 << 20
MAX_QUEUED_BYTES = 16 << 20
"""Bytes of frames that must not be dropped: a page with more waiting is disconnected."""


MAX_REPLAYS = 32
"""Runs that wait to be sent again to one page."""
Replay = Callable[[], Iterable[LogEntry]]
"""Returns the frames to send again, as they are when it is called."""


@dataclasses.dataclass(slots=True)
class GapRange:
    """Consecutive frames of one kind that a page does not get."""

    run: str
    what: str
    first: int
    last: int
    reason: str

    def frame(self, seq: int) -> bytes:
        """Return the GAP to send before the frame with this number."""
        header = {"seq": seq, "run": self.run, "what": self.what, "from": self.first, "to": self.last}
        return frames.encode(Frame(FrameType.SCOPE_GAP, header | {"ranks": [], "reason": self.reason}))


@dataclasses.dataclass(slots=True)
class _QueuedFrame:
    entry: LogEntry
    short: bool = False
    reason: str = "slow"

    @property
    def size(self) -> int:
        return len((self.entry.short if self.short else self.entry.whole) or b"")


class PageQueue:
    """Queue of one page; one that is `overrun` must be disconnected."""

    def __init__(self, credit: int = GRANTED_BYTES, limit_bytes: int = MAX_WAITING_BYTES) -> None:
        self.credit = credit
        self._limit = limit_bytes
        self._queue: deque[_QueuedFrame] = deque()
        self._backlog: deque[LogEntry] = deque()
        """Frames that were requested again: the memory budget holds them anyway, and they are sent as fast as the page
        paints."""
        self._replays: dict[str, Replay] = {}
        """Runs that were requested again and wait for the one before: the frames of one at a time are held."""
        self._replayed = ""
        self._gaps: dict[tuple[str, str], GapRange] = {}
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._backlog) + len(self._replays)

    @property
    def overrun(self) -> bool:
        """Return whether more waits than for any page that reads."""
        return self.waiting_bytes > MAX_QUEUED_BYTES

    def grant(self, count: int) -> None:
        """Add credit: the page has painted this many bytes."""
        self.credit = min(GRANTED_BYTES, self.credit + count)

    def push(self, entry: LogEntry) -> None:
        """Queue a frame, and drop older ones if too much waits."""
        self._queue.append(_QueuedFrame(entry))
        self.waiting_bytes += self._queue[-1].size
        for drop in (DropClass.ROWS, DropClass.VECTORS):
            if self.waiting_bytes > self._limit:
                self._shorten(drop)

    def _shorten(self, drop: DropClass) -> None:
        """Drop frames of one class, the oldest first, until there is room."""
        for waiting in self._queue:
            if self.waiting_bytes <= self._limit:
                return
            if waiting.entry.drop == drop and not waiting.short:
                self.waiting_bytes -= waiting.size
                waiting.short = True
                self.waiting_bytes += waiting.size

    def resume(self, run: str, replay: Replay) -> None:
        """Send these frames of a run instead of all that wait of it; those that are no longer stored become a gap.

        One run is sent again at a time: `replay` of the next one is called once the one before has been sent.
        """
        if self._backlog and self._replayed == run:
            self._backlog.clear()
        self._replays.pop(run, None)
        if len(self._replays) < MAX_REPLAYS:
            self._replays[run] = replay
        self._next_replay()

    def _next_replay(self) -> None:
        if self._backlog or not self._replays:
            return
        run = next(iter(self._replays))
        entries = self._replays.pop(run)()
        self._queue = deque(waiting for waiting in self._queue if waiting.entry.run != run)
        self.waiting_bytes = sum(waiting.size for waiting in self._queue)
        self._replayed = run
        self._backlog.extend(entries)

    def pop(self) -> list[bytes]:
        """Return the next frames to send, in order; none if the queue is empty or the page must paint first."""
        while len(self):
            self._next_replay()
            if self._must_paint_first():
                return []
            waiting = self._next()
            frame = None if waiting is None else self._take(waiting)
            if waiting is not None and frame is not None:
                gaps = [gap.frame(waiting.entry.seq) for gap in self._gaps.values()]
                self._gaps.clear()
                return [*gaps, frame]
        return self._last_gaps()

    def _must_paint_first(self) -> bool:
        """Return whether the next frame of a replay needs more credit: a page gets all that it requested again."""
        whole = self._backlog[0].whole if self._backlog and self._backlog[0].drop != DropClass.NEVER else None
        return whole is not None and self.credit < min(len(whole), GRANTED_BYTES)

    def _next(self) -> _QueuedFrame | None:
        if self._backlog:
            return _QueuedFrame(self._backlog.popleft())
        if not self._queue:
            return None
        waiting = self._queue.popleft()
        self.waiting_bytes -= waiting.size
        return waiting

    def _take(self, waiting: _QueuedFrame) -> bytes | None:
        """Return the bytes to send of a frame: whole, short, or None."""
        entry = waiting.entry
        if entry.drop == DropClass.NEVER:
            return entry.whole
        if entry.whole is not None and not waiting.short and self.credit >= len(entry.whole):
            self.credit -= len(entry.whole)
            return entry.whole
        self._note(entry, "old" if entry.whole is None else "slow")
        return entry.short

    def _note(self, entry: LogEntry, reason: str) -> None:
        gap = self._gaps.setdefault(
            (entry.run, entry.what), GapRange(entry.run, entry.what, entry.step, entry.step, reason)
        )
        gap.last = entry.step

    def _last_gaps(self) -> list[bytes]:
        gaps = [gap.frame(0) for gap in self._gaps.values()]
        self._gaps.clear()
        return gaps
