"""Ingest whose input is also stored on disk, so that a hub that is started again has it."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from megatronapp_analyzer.hub.ingest.ingest import IngestResult, TraceIngest
from megatronapp_analyzer.hub.ingest.restore import curve_frame, digest_frame, restore
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits, SpoolReader, SpoolThread, SpoolWriter
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_common.frames import Frame


class SpooledIngest:
    """Ingest in memory and in the spool. Without a folder, or if it is not `writable`, nothing is written."""

    def __init__(
        self, ingest: TraceIngest, directory: pathlib.Path | None, limits: SpoolLimits, *, writable: bool = True
    ) -> None:
        self._ingest = ingest
        self._directory = directory
        self._limits = limits
        self._writable = writable
        self._writer: SpoolThread | None = None
        self._rings: dict[tuple[int, int, int | None], Any] = {}
        """Metadata of rings as they are in the spool."""

    def restore(self, newest_segments: int | None) -> list[StoredStep]:
        """Read the spool, then open it for writing; return the steps that are held in full, oldest first."""
        if self._directory is None:
            return []
        steps = restore(SpoolReader(self._directory), self._ingest, newest_segments=newest_segments)
        if self._writable:
            self._writer = SpoolThread(SpoolWriter(self._directory, self._limits))
        return steps

    @property
    def failed_writes(self) -> int:
        """Return the number of frames that the disk did not take."""
        return self._writer.failed_writes if self._writer else 0

    @property
    def dropped_frames(self) -> int:
        """Return the number of frames that were dropped because the disk was too slow."""
        return self._writer.dropped_frames if self._writer else 0

    def add_ring(self, attempt: int, worker: int, header: Mapping[str, Any], raw: bytes) -> list[StoredStep]:
        """Add a RING frame; return the unfinished steps of older attempts, which end here."""
        finished = self._ingest.add_ring(attempt, header)
        self._append_digests(finished)
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
            self._append_digests(result.finished)
        return result

    def end_attempt(self, attempt: int) -> list[StoredStep]:
        """Finish the unfinished steps of an attempt, as incomplete ones."""
        finished = self._ingest.end_attempt(attempt)
        self._append_digests(finished)
        return finished

    def close(self) -> None:
        """Write what waits, as long as the disk takes it soon, and close the files of the spool."""
        if self._writer:
            self._writer.close()

    def _append_digests(self, finished: Iterable[StoredStep]) -> None:
        if self._writer:
            for step in finished:
                self._writer.append_digest(step.view.attempt, digest_frame(step.digest))
