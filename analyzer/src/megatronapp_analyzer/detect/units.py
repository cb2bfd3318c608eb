"""Units: ranks that meet inside a compute span (tensor, context, expert parallel), and so are slow together.

Without tensor parallelism every rank is a unit by itself. Units of the same pipeline stage do the same work: peers.
"""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.features import Floats, Ints, Mask
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.model import JobLayout, StepRecords
from megatronapp_common.trace import PASS_KINDS

CLEARLY_LATER = 2.0
"""How many times later than the second the last member must be to be clearly the last."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """The unit of each rank, and the stage and the replica of each unit."""

    of_rank: Ints
    stage: Ints
    replica: Ints

    @classmethod
    def of(cls, layout: JobLayout) -> "Units":
        """Number the units of a layout in order of their first rank."""
        keys = [(stage, at.dp // layout.ep) for stage, at in zip(layout.stages, layout.coordinates, strict=True)]
        names = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return cls(
            of_rank=np.array([names[key] for key in keys], np.int64),
            stage=np.array([stage for stage, _ in names], np.int64),
            replica=np.array([replica for _, replica in names], np.int64),
        )

    def __len__(self) -> int:
        return len(self.stage)

    def ranks(self, unit: int) -> tuple[int, ...]:
        """Return the members of a unit."""
        return tuple(int(rank) for rank in np.flatnonzero(self.of_rank == unit))

    def slowest(self, values: Floats) -> Floats:
        """Return the largest value among the members of each unit; NaN where none has a value.

        A slow member holds up the others only where they do not wait anyway, so its own time is the best measure.
        """
        out = np.full(len(self), np.nan)
        np.fmax.at(out, self.of_rank, values)
        return out

    def members_in(self, ranks: Mask) -> Mask:
        """Return units of which some member is in `ranks`."""
        out = np.zeros(len(self), np.bool_)
        out[self.of_rank[ranks]] = True
        return out

    @property
    def has_peers(self) -> Mask:
        """True for units with other units that do the same work."""
        mask: Mask = np.bincount(self.stage)[self.stage] > 1
        return mask


def lateness(view: StepRecords, ranks: tuple[int, ...]) -> Floats:
    """Return how much later than the first of `ranks` each leaves its compute spans, as a part of them, median.

    Members of a unit wait for each other inside a span, so its length is the same for all; the slow one leaves last.
    Of long spans by more seconds than of short ones: the parts are alike, whichever spans are lost.
    """
    spans = view.records[np.isin(view.records["rank"], ranks)]
    spans = spans[rec.is_kind(spans["kind"], PASS_KINDS)]
    length = rec.durations_s(spans)
    end = rec.starts_s(spans, view.start_ns) + length
    work = (spans["kind"].astype(np.int64) << 32) | (spans["chunk"].astype(np.int64) << 16) | spans["microbatch"]
    names, row = np.unique(work, return_inverse=True)
    table, lengths = np.full((2, len(names), len(ranks)), np.nan)
    place = row, np.searchsorted(ranks, spans["rank"])
    table[place], lengths[place] = end, length
    known = np.isfinite(table).all(axis=1) & (lengths > 0).all(axis=1)
    if not known.any():
        return np.zeros(len(ranks))
    whole = table[known]
    parts = (whole - whole.min(axis=1, keepdims=True)) / lengths[known].max(axis=1, keepdims=True)
    late: Floats = np.median(parts, axis=0)
    return late


def last_member(late: Floats, least: float) -> int | None:
    """Return the index of the member that is clearly the last, or None."""
    order = np.argsort(late)
    first, second = late[order[-1]], late[order[-2]]
    if first < least or first < CLEARLY_LATER * second:
        return None
    return int(order[-1])
