"""One step with the spans of its ranks' streams and what matches them, found once for all that read the step."""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.matching import Collectives, Index, Messages, messages_of, step_collectives_of
from megatronapp_analyzer.graph.records import (
    CommIndex,
    RecordColumns,
    SpanColumns,
    columns_of,
    comm_index,
    is_kind,
    rows_of,
    stream_rows,
)
from megatronapp_analyzer.model import RankRecords, StepRecords, select_rows
from megatronapp_common.trace import RecordKind

Seconds = NDArray[np.float64]


class MatchedStep:
    """A step; its spans, messages and collectives are found when they are first read. Indices are into `spans`."""

    def __init__(self, view: StepRecords) -> None:
        self.view = view

    @functools.cached_property
    def record_columns(self) -> RecordColumns:
        """Columns of all records of the view."""
        return RecordColumns.of(self.view.records)

    @property
    def start_ns(self) -> int:
        """Earliest start of a record; 0 without records."""
        return self.record_columns.start_ns if len(self.view.records) else 0

    def of_kinds(self, kinds: frozenset[RecordKind]) -> RankRecords:
        """Return the records of the view of some kinds, in their order."""
        if not self.record_columns.count[list(kinds)].any():
            return self.view.records[:0]
        return select_rows(self.view.records, is_kind(self.record_columns.kind, kinds))

    def view_of_kinds(self, kinds: frozenset[RecordKind]) -> StepRecords:
        """Return the view without records of other kinds."""
        return dataclasses.replace(self.view, records=self.of_kinds(kinds))

    @functools.cached_property
    def rows(self) -> Index:
        """Rows of the view's records that are entries of their rank's stream, by rank, then start."""
        return stream_rows(self.view.records)

    @functools.cached_property
    def spans(self) -> RankRecords:
        """The records of these rows."""
        return rows_of(self.view.records, self.rows)

    @property
    def times_s(self) -> tuple[Seconds, Seconds]:
        """Start and end of each span in seconds after the first record, as `laid_out_s` gives them."""
        return self.columns.start_s, self.columns.end_s

    @functools.cached_property
    def columns(self) -> SpanColumns:
        """Columns of the spans; times are in seconds after the first record."""
        return columns_of(self.spans, self.start_ns)

    @functools.cached_property
    def index(self) -> CommIndex:
        """Numbers of the communicators."""
        return comm_index(self.view.comms)

    @functools.cached_property
    def messages(self) -> Messages:
        """Messages between the ranks."""
        return messages_of(self.spans, self.index)

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Collectives in the streams of the ranks."""
        return step_collectives_of(self.spans, self.columns.rank, self.index)

    def find_all(self) -> None:
        """Find spans, messages and collectives, before several threads read the step."""
        _ = self.columns, self.messages, self.collectives

    def on_other_clocks(self, view: StepRecords) -> "MatchedStep":
        """Return the same records with other times, of which those of a rank differ by a constant: they match alike."""
        moved = MatchedStep(view)
        moved.rows, moved.index = self.rows, self.index
        if len(view.records):
            moved.record_columns = dataclasses.replace(self.record_columns, start_ns=view.start_ns)
        moved.messages, moved.collectives = self.messages, self.collectives
        return moved
