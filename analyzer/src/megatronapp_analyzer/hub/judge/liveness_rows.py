"""Liveness of ranks as rows of plain values: pickle takes a tenth of the time for them that it takes for dataclasses.

The hub sends the liveness of all ranks several times a second, and Python's pickling of dataclasses reads the fields
of each object in the thread that also answers pages.
"""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

from megatronapp_analyzer.model import CurrentSpan, RankLiveness

Row = tuple[Any, ...]
"""Values of one rank, in the order of the fields; a span is a tuple, too."""

_RANK_FIELDS = tuple(field.name for field in dataclasses.fields(RankLiveness))
_SPAN_FIELDS = tuple(field.name for field in dataclasses.fields(CurrentSpan))
_rank_values = operator.attrgetter(*_RANK_FIELDS)
_span_values = operator.attrgetter(*_SPAN_FIELDS)
_SPANS = tuple(_RANK_FIELDS.index(name) for name in ("open_span", "device_span"))


def rows_of(ranks: Iterable[RankLiveness]) -> list[Row]:
    """Return a row of each rank."""
    rows = []
    for rank in ranks:
        values = list(_rank_values(rank))
        for place in _SPANS:
            if values[place] is not None:
                values[place] = _span_values(values[place])
        rows.append(tuple(values))
    return rows


def ranks_of(rows: Iterable[Row]) -> list[RankLiveness]:
    """Return the ranks that `rows_of` has written."""
    ranks = []
    for row in rows:
        values = dict(zip(_RANK_FIELDS, row, strict=True))
        for name in ("open_span", "device_span"):
            if values[name] is not None:
                values[name] = CurrentSpan(**dict(zip(_SPAN_FIELDS, values[name], strict=True)))
        ranks.append(RankLiveness(**values))
    return ranks
