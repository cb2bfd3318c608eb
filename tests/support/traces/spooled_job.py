"""A hub's writing of traces without a hub: frames of a job go through the spool into the archive."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatronapp_analyzer.hub.archive.rows import ROW, Rows
from megatronapp_analyzer.hub.archive.spooled_ingest import SpooledIngest
from megatronapp_analyzer.hub.archive.stored import StoredTraces
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.trace import RECORD

JOB = "demo"
Identity = tuple[int | None, int, int]
"""Rank, worker and index of a record, which identify it in its attempt."""


def records_frame(rank: int, first: int, body: bytes) -> bytes:
    """Return the RECORDS frame of a rank that is the only one of its worker."""
    header = {"rank": rank, "worker": rank, "first": first, "lost": 0}
    return frames.encode(Frame(FrameType.RECORDS, header, body))


class SpooledJob:
    """Two ranks whose steps are stored under a folder."""

    def __init__(self, folder: Path, step_rows: Any, ring_header: Any, limits: SpoolLimits | None = None) -> None:
        self.folder = folder
        self._step_rows = step_rows
        self._ring_header = ring_header
        self.ingest = TraceIngest(StoreLimits(), aligns=False)
        limits = limits or SpoolLimits(segment_bytes=4000)
        self.spooled = SpooledIngest(self.ingest, folder / "traces", limits, archive=folder / "store" / JOB)
        self.restored = self.spooled.restore(4)

    def announce(self, attempt: int = 0) -> None:
        """Send the rings of both ranks."""
        for rank in (0, 1):
            header = self._ring_header(rank)
            self.spooled.add_ring(attempt, rank, header, frames.encode(Frame(FrameType.RING, header)))

    def write(self, steps: range, attempt: int = 0) -> None:
        """Send steps of both ranks, of which all have equally many records."""
        for step in steps:
            for rank in (0, 1):
                rows = self._step_rows(rank, step)
                raw = records_frame(rank, step * len(rows), rows.tobytes())
                self.spooled.add_records(attempt, frames.decode(raw), raw)

    def settle(self) -> None:
        """Wait until nothing waits for the disk or the archive."""
        self.spooled._writer.wait_until_written()  # type: ignore[union-attr]
        self.spooled.archiver.wait_until_idle()  # type: ignore[union-attr]

    @property
    def stored(self) -> StoredTraces:
        """Reader of what is stored."""
        return self.spooled.stored


def all_rows(stored: StoredTraces, attempt: int = 0) -> Rows:
    """Return all stored records of an attempt, by ring and index."""
    rows = np.concatenate([np.zeros(0, ROW), *stored.rows(attempt)])
    return rows[np.lexsort((rows["index"], rows["worker"], rows["rank"]))]


def identities(rows: Rows) -> Iterator[Identity]:
    """Yield the identity of each row."""
    return zip(rows["rank"].tolist(), rows["worker"].tolist(), rows["index"].tolist(), strict=True)


def sent_rows(step_rows: Callable[..., Any], rank: int, steps: range) -> Any:
    """Return the records that a rank has sent in some steps."""
    return np.concatenate([np.zeros(0, RECORD), *(step_rows(rank, step) for step in steps)])
