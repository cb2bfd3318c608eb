"""Ingest whose input is also stored on disk, so that a hub that is started again has it."""

import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.align.step_clocks import ClockReading
from megatronapp_analyzer.hub.archive.archiver import Archiver
from megatronapp_analyzer.hub.archive.catalog import Catalog
from megatronapp_analyzer.hub.archive.clocks import clock_frame
from megatronapp_analyzer.hub.archive.restore import curve_frame, digest_frame, restore
from megatronapp_analyzer.hub.archive.stored import StoredTraces
from megatronapp_analyzer.hub.ingest.ingest import IngestResult, TraceIngest
from megatronapp_analyzer.hub.ingest.spool import CLOSE_S, SpoolLimits, SpoolThread, SpoolWriter
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_common.frames import Frame


class SpooledIngest:
    """Ingest in memory, in the spool and in the archive. Without a folder, or if not `writable`, nothing is written."""

    def __init__(
        self,
        ingest: TraceIngest,
        directory: pathlib.Path | None,
        limits: SpoolLimits,
        *,
        archive: pathlib.Path | None = None,
        writable: bool = True,
    ) -> None:
        """Create without reading. `archive`: folder of the job in the archive; records stay in the spool without it."""
        self._ingest = ingest
        self._directory = directory
        self._archive_folder = archive
        self._limits = limits
        self._writable = writable
        self._writer: SpoolThread | None = None
        self._rings: dict[tuple[int, int, int | None], Any] = {}
        """Metadata of rings as they are in the spool."""
        self._offsets: dict[int, NDArray[np.int64]] = {}
        """Newest clocks of each attempt as they are in the spool."""
        self.catalog: Catalog | None = None
        """Files of the archive, once the stored traces have been read."""
        self.archiver: Archiver | None = None

    def restore(self, newest_segments: int | None) -> list[StoredStep]:
        """Read what is stored, then open it for writing; return the steps that are held in full, oldest first."""
        if self._directory is None and self._archive_folder is None:
            return []
        if self._archive_folder is not None:
            limit_bytes = self._limits.archive_bytes
            self.catalog = Catalog(self._archive_folder, limit_bytes=limit_bytes, writable=self._writable)
        steps = restore(self.stored, self._ingest, newest_segments=newest_segments, skip_unreadable=True)
        if self.catalog is not None:
            for attempt in self._ingest.attempts:
                self._ingest.skip_below(attempt, self.catalog.next_indices(attempt))
        if self._writable and self._directory is not None:
            self._open(self._directory)
        return steps

    @property
    def stored(self) -> StoredTraces:
        """Return the reader of what is stored."""
        return StoredTraces(self._directory, self.catalog)

    def _open(self, directory: pathlib.Path) -> None:
        if self.catalog is None:
            self._writer = SpoolThread(SpoolWriter(directory, self._limits))
            return
        self.archiver = Archiver(directory, self.catalog, makes_space=True)
        writer = SpoolWriter(directory, self._limits, first_segment=self.catalog.next_segment)
        writer.on_closed = self.archiver.add
        self.archiver.start()
        self._writer = SpoolThread(writer)

    @property
    def failed_writes(self) -> int:
        """Return the number of frames and files that the disk did not take."""
        frames = self._writer.failed_writes if self._writer else 0
        return frames + (self.archiver.failed_writes if self.archiver else 0)

    @property
    def dropped_frames(self) -> int:
        """Return the number of frames that were dropped because the disk was too slow."""
        return self._writer.dropped_frames if self._writer else 0

    @property
    def dropped_segments(self) -> int:
        """Return the number of segments that were deleted for space before they were archived."""
        return self._writer.dropped_segments if self._writer else 0

    def add_ring(self, attempt: int, worker: int, header: Mapping[str, Any], raw: bytes) -> list[StoredStep]:
        """Add a RING frame; return the unfinished steps of older attempts, which end here."""
        finished = self._ingest.add_ring(attempt, header)
        self._append_sums(finished)
        key, metadata = (attempt, worker, header.get("rank")), header.get("metadata")
        if self._writer and self._rings.get(key) != metadata:
            self._writer.append_ring(attempt, raw, key)
            self._rings[key] = metadata
        return finished

    def add_records(self, attempt: int, frame: Frame, raw: bytes) -> IngestResult:
        """Add a RECORDS frame; one without new records is not stored. Raises ProtocolError."""
        result = self._ingest.add_records(attempt, frame.header, frame.body)
        if self._writer and result.records:
            self._writer.append_records(attempt, raw)
            if result.points:
                self._writer.append_curve(attempt, curve_frame(result.points))
            self._append_sums(result.finished)
        return result

    def take_reading(self, reading: ClockReading) -> None:
        """Take the clocks at a step, for its times in memory and in the archive."""
        offsets = self._ingest.take_reading(reading)
        if offsets is not None:
            self._append_clocks(reading.attempt, reading.step, offsets)

    def forget_readings(self) -> None:
        """Forget the clocks of all attempts, because their source is lost."""
        self._ingest.forget_readings()

    def end_attempt(self, attempt: int) -> list[StoredStep]:
        """Finish the unfinished steps of an attempt, as incomplete ones."""
        finished = self._ingest.end_attempt(attempt)
        self._append_sums(finished)
        return finished

    def close(self) -> None:
        """Write what waits, as long as the disk takes it soon, close the files of the spool, and archive them."""
        begun_s = time.monotonic()
        if self._writer:
            self._writer.close(CLOSE_S)
        if self.archiver:
            self.archiver.close(CLOSE_S - (time.monotonic() - begun_s))

    def _append_sums(self, finished: Iterable[StoredStep]) -> None:
        if self._writer:
            for step in finished:
                self._writer.append_digest(step.view.attempt, digest_frame(step.digest))
                self._append_clocks(step.view.attempt, step.view.step, step.offsets_ns)

    def _append_clocks(self, attempt: int, step: int, offsets_ns: NDArray[np.int64]) -> None:
        """Store the clocks at a step among its records, if they have changed, for the archive."""
        if self._writer is None or self._archive_folder is None:
            return
        known = self._offsets.get(attempt)
        if known is None or not np.array_equal(known, offsets_ns):
            self._offsets[attempt] = offsets_ns
            self._writer.append_clock(attempt, clock_frame(step, offsets_ns))
