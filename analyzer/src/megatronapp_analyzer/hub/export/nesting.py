"""Placing the spans of a track so that each two are nested or disjoint, which viewers require.

Perfetto closes a span when one begins that starts at its end or later, and drops a span that outlasts one that is still
open (`slice_tracker.cc`, statistic `slice_drop_overlapping_complete_event`). Times of devices are rounded, so that
neighbours overlap by some nanoseconds: those are moved. Spans that really overlap get another row.
"""

import bisect
import collections
import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import ExportError

SLACK_NS = 1000
"""Nanoseconds by which times are moved at most: the rounding of those of devices (32-bit floats of up to 16 s)."""
NESTED_ROWS = 16
"""Rows that are tried for each span; in further ones no span encloses another, so that many rows take little time."""
MOST_ROWS = 4096
"""Rows that a track has at most."""
Nanoseconds = NDArray[np.int64]


class _Row:
    """Ends of the spans that are open in a row, outermost first, when the newest one begins."""

    def __init__(self) -> None:
        self._open: list[int] = []
        self._newest_start: int | None = None

    def place(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the times of a span in this row, and open it; None if it overlaps another. Starts must ascend."""
        begin = start if self._newest_start is None else max(start, self._newest_start)
        while self._open and self._open[-1] <= begin:  # ends before all that follows, too
            self._open.pop()
        finish = end
        depth = len(self._open)
        while depth:
            enclosing = self._open[depth - 1]
            if enclosing <= begin:
                depth -= 1
            elif finish <= enclosing:
                break
            elif finish - enclosing <= SLACK_NS:
                finish = enclosing
            else:
                begin = enclosing  # a neighbour, if it may be moved so far
                depth -= 1
                if begin - start > SLACK_NS:
                    return None
        finish = max(begin, finish)
        self._open[depth:] = [finish]
        self._newest_start = begin
        return begin, finish


def _with_enclosing_first(starts: Nanoseconds, ends: Nanoseconds) -> Nanoseconds:
    """Return the starts, with those of spans that begin just after what they enclose moved to its start."""
    moved = starts.copy()
    recent: collections.deque[tuple[int, list[int]]] = collections.deque()  # starts, and ascending: negative ends
    for index in np.lexsort((-ends, starts)).tolist():
        start, end = int(starts[index]), int(ends[index])
        while recent and recent[0][0] < start - SLACK_NS:
            recent.popleft()
        for begin, negative_ends in recent:
            latest = bisect.bisect_right(negative_ends, -end)  # of those before `end`
            if latest < len(negative_ends) and -negative_ends[latest] > start + SLACK_NS:
                moved[index] = begin
                break
        if not recent or recent[-1][0] != start:
            recent.append((start, []))
        recent[-1][1].append(-end)
    return moved


def place_spans(starts: Nanoseconds, ends: Nanoseconds) -> Iterator[tuple[int, int, int, int]]:
    """Yield index, row, start and end of each span, so that those of a row are nested or disjoint.

    In the order of their starts, enclosing spans first. Starts and ends differ by SLACK_NS at most from those given.
    Raises ExportError if more than MOST_ROWS spans overlap.
    """
    rows: list[_Row] = []
    further: list[tuple[int, int]] = []  # a heap: when a further row is free, and its number
    starts = _with_enclosing_first(starts, ends)
    for index in np.lexsort((-ends, starts)).tolist():
        start, end = int(starts[index]), int(ends[index])
        for number, row in enumerate(rows):
            if (placed := row.place(start, end)) is not None:
                yield index, number, *placed
                break
        else:
            if len(rows) < NESTED_ROWS:
                rows.append(_Row())
                rows[-1].place(start, end)
                yield index, len(rows) - 1, start, end
                continue
            number = heapq.heappop(further)[1] if further and further[0][0] <= start else NESTED_ROWS + len(further)
            if number >= MOST_ROWS:
                raise ExportError(f"more than {MOST_ROWS} spans of a track overlap; export fewer steps")
            heapq.heappush(further, (end, number))
            yield index, number, start, end
