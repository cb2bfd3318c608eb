"""Placing the spans of a track so that each two are nested or disjoint, which viewers require.

Perfetto closes a span when one begins that starts at its end or later, and drops a span that outlasts one that is still
open (`slice_tracker.cc`, statistic `slice_drop_overlapping_complete_event`). Times of devices are rounded, so that
neighbours overlap by some nanoseconds: those are moved. Spans that really overlap get another row.
"""

import collections
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SLACK_NS = 1000
"""Nanoseconds by which times are moved at most: the rounding of those of devices (32-bit floats of up to 16 s)."""
Nanoseconds = NDArray[np.int64]


class _Row:
    """Ends of the spans that are open in a row, outermost first, when the newest one begins."""

    def __init__(self) -> None:
        self._open: list[int] = []
        self._newest_start: int | None = None

    def place(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the times of a span in this row, and open it; None if it overlaps another. Starts must ascend."""
        begin = start if self._newest_start is None else max(start, self._newest_start)
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
    recent: collections.deque[tuple[int, int]] = collections.deque()
    for index in np.lexsort((-ends, starts)).tolist():
        start, end = int(starts[index]), int(ends[index])
        while recent and recent[0][0] < start - SLACK_NS:
            recent.popleft()
        inner = [begin for begin, finish in recent if start + SLACK_NS < finish < end]
        moved[index] = min([start, *inner])
        recent.append((start, end))
    return moved


def place_spans(starts: Nanoseconds, ends: Nanoseconds) -> Iterator[tuple[int, int, int, int]]:
    """Yield index, row, start and end of each span, so that those of a row are nested or disjoint.

    In the order of their starts, enclosing spans first. Starts and ends differ by SLACK_NS at most from those given.
    """
    rows: list[_Row] = []
    starts = _with_enclosing_first(starts, ends)
    for index in np.lexsort((-ends, starts)).tolist():
        start, end = int(starts[index]), int(ends[index])
        number = 0
        while True:
            if number == len(rows):
                rows.append(_Row())
            placed = rows[number].place(start, end)
            if placed is not None:
                yield index, number, *placed
                break
            number += 1
