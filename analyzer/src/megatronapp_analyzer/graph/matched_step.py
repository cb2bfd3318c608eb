"""One step with the spans of its ranks' streams and what matches them, found once for all that read the step."""

import functools

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.matching import Collectives, Index, Messages, collectives_of, messages_of
from megatronapp_analyzer.graph.records import CommIndex, SpanColumns, columns_of, comm_index, stream_rows
from megatronapp_analyzer.model import RankRecords, StepRecords, select_rows

Seconds = NDArray[np.float64]


class MatchedStep:
    """A step; its spans, messages and collectives are found when they are first read. Indices are into `spans`."""

    def __init__(self, view: StepRecords) -> None:
        self.view = view

    @functools.cached_property
    def rows(self) -> Index:
        """Rows of the view's records that are entries of their rank's stream, by rank, then start."""
        return stream_rows(self.view.records)

    @functools.cached_property
    def spans(self) -> RankRecords:
        """The records of these rows."""
        return select_rows(self.view.records, self.rows)

    @property
    def times_s(self) -> tuple[Seconds, Seconds]:
        """Start and end of each span in seconds after the first record, as `laid_out_s` gives them."""
        return self.columns.start_s, self.columns.end_s

    @functools.cached_property
    def columns(self) -> SpanColumns:
        """Columns of the spans; times are in seconds after the first record."""
        return columns_of(self.spans, self.view.start_ns if len(self.view.records) else 0)

    @functools.cached_property
    def index(self) -> CommIndex:
        """Numbers of the communicators."""
        return comm_index(self.view.comms)

    @functools.cached_property
    def numbers(self) -> Index:
        """Number of the communicator of each span; -1 without."""
        return self.index.numbers(self.spans)

    @functools.cached_property
    def messages(self) -> Messages:
        """Messages between the ranks."""
        return messages_of(self.spans, self.index)

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Collectives in the streams of the ranks."""
        return collectives_of(self.spans, self.index, self.numbers)

    def on_other_clocks(self, view: StepRecords) -> "MatchedStep":
        """Return the same records with other times, of which those of a rank differ by a constant: they match alike."""
        moved = MatchedStep(view)
        moved.rows, moved.index, moved.numbers = self.rows, self.index, self.numbers
        moved.messages, moved.collectives = self.messages, self.collectives
        return moved
