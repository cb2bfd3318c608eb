"""Values of the archive that need no Parquet library."""

import dataclasses
import pathlib
from collections.abc import Mapping

from megatronapp_analyzer.hub.archive.rows import RingRange, Rows, is_sample, real_ns
from megatronapp_analyzer.hub.ingest.ingest import RingKey
from megatronapp_analyzer.model import select_rows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Least and greatest of some numbers."""

    least: int
    most: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveFile:
    """A file with records, and what its footer says of them."""

    path: pathlib.Path
    attempt: int
    segment: int
    size: int
    records: int
    steps: Extent | None
    """Steps of all spans; None without spans."""
    ended: Extent | None
    """Steps that ended: those with a STEP record."""
    real_ns: Extent
    """Starts of all records."""
    rings: Mapping[RingKey, RingRange]

    @property
    def hour(self) -> str:
        """Return the name of the hour that the file is stored under."""
        return self.path.parent.name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowFilter:
    """Steps, ranks and real time of the spans to read; None is open. Ends are included."""

    steps: tuple[int, int] | None = None
    ranks: tuple[int, int] | None = None
    real_ns: tuple[int, int] | None = None

    def may_have(self, file: ArchiveFile) -> bool:
        """Return true if a file may have such spans."""
        return file.steps is not None and self.overlaps(file.steps, None, file.real_ns)

    def overlaps(self, steps: Extent, ranks: Extent | None, starts: Extent) -> bool:
        """Return true if rows with these least and greatest values may have such spans; ranks may be unknown."""
        pairs = ((self.steps, steps), (self.ranks, ranks), (self.real_ns, starts))
        return all(
            bounds is None or span is None or (span.least <= bounds[1] and span.most >= bounds[0])
            for bounds, span in pairs
        )

    def apply(self, rows: Rows) -> Rows:
        """Return the rows that are such spans."""
        chosen = ~is_sample(rows)
        for bounds, column in ((self.steps, rows["step"]), (self.ranks, rows["rank"]), (self.real_ns, real_ns(rows))):
            if bounds is not None:
                chosen &= (column >= bounds[0]) & (column <= bounds[1])
        return select_rows(rows, chosen)
