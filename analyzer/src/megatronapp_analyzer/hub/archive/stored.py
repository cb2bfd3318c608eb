"""Reading of the stored traces of a job: each record once, from the archive or, before it is there, from the spool."""

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megatronapp_analyzer.errors import ArchiveError
from megatronapp_analyzer.hub.archive import names
from megatronapp_analyzer.hub.archive.catalog import Catalog
from megatronapp_analyzer.hub.archive.clocks import ring_offsets, set_offsets, step_offsets
from megatronapp_analyzer.hub.archive.rows import ROW, Rows, collect, frames_of
from megatronapp_analyzer.hub.archive.segments import read_segment
from megatronapp_analyzer.hub.archive.values import ArchiveFile, RowFilter
from megatronapp_analyzer.hub.ingest.ingest import RingKey
from megatronapp_analyzer.hub.ingest.spool import SpoolReader, segment_number
from megatronapp_common.frames import Frame, FrameType

LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Records of one segment: a file of the archive, or a segment of the spool that is not archived."""

    attempt: int
    segment: int
    file: ArchiveFile | None
    path: pathlib.Path


class StoredTraces:
    """Reader of the stored traces of one job, also while they are written. Either source may be absent.

    A record is in the spool until its file of the archive is whole, and then until its segment is deleted in both: the
    spool is listed first, and the archive has precedence.
    """

    def __init__(self, spool: pathlib.Path | None, catalog: Catalog | None) -> None:
        self._spool = None if spool is None else SpoolReader(spool)
        self._catalog = catalog

    def attempts(self) -> list[int]:
        """Return the attempts that left traces, ascending."""
        found = set() if self._spool is None else set(self._spool.attempts())
        return sorted(found | {file.attempt for file in self._files(None)})

    def rings(self, attempt: int) -> Iterator[Frame]:
        """Yield the RING frames of an attempt; the newest of a ring is the last one. Raises ArchiveError."""
        is_known = False
        for frame in () if self._spool is None else self._spool.rings(attempt):
            is_known = True
            yield frame
        if is_known or self._catalog is None:
            return
        for folder in sorted({file.path.parent for file in self._files(attempt)}):
            for header in read_rings(folder / names.rings_name(attempt)):
                yield Frame(FrameType.RING, header)

    def archived_steps(self) -> Iterator[int]:
        """Yield the first and the last step of each file of the archive."""
        for file in self._files(None):
            if file.ended is not None:
                yield from (file.ended.least, file.ended.most)

    def digests(self, attempt: int) -> Iterator[Frame]:
        """Yield the DIGEST frames of an attempt."""
        return iter(()) if self._spool is None else self._spool.digests(attempt)

    def curves(self, attempt: int) -> Iterator[Frame]:
        """Yield the CURVE frames of an attempt."""
        return iter(()) if self._spool is None else self._spool.curves(attempt)

    def parts(self, attempt: int, steps: tuple[int, int] | None = None) -> list[Part]:
        """Return where the records of an attempt are, in the order in which they were received.

        With `steps`, files of the archive without spans of them are omitted.
        """
        return self._listed(attempt, None if steps is None else RowFilter(steps=steps))[0]

    def _listed(self, attempt: int, chosen: RowFilter | None) -> tuple[list[Part], dict[RingKey, int]]:
        """Return the parts of an attempt, and the index after the newest record of each ring in the archive."""
        segments = [] if self._spool is None else self._spool.segments(attempt)
        files, indices = self._snapshot(attempt)
        found = {
            number: Part(attempt=attempt, segment=number, file=None, path=path)
            for path in segments
            if (number := segment_number(path)) is not None
        }
        for file in files:
            found[file.segment] = Part(attempt=attempt, segment=file.segment, file=file, path=file.path)
        parts = [part for _, part in sorted(found.items())]
        return [part for part in parts if chosen is None or part.file is None or chosen.may_have(part.file)], indices

    def _snapshot(self, attempt: int) -> tuple[list[ArchiveFile], dict[RingKey, int]]:
        """Return the files of the archive as they are now: what the spool has no more is among them."""
        if self._catalog is None:
            return [], {}
        self._catalog.refresh()
        return self._catalog.snapshot(attempt)

    def frames(self, part: Part) -> Iterator[Frame]:
        """Yield the records of a part as RECORDS frames. A part that was dropped or is damaged has none."""
        if part.file is None:
            try:
                yield from read_segment(part.path).frames
            except FileNotFoundError:
                if (moved := self._moved(part)) is not None:
                    yield from self.frames(moved)
            except OSError as error:
                LOG.warning("%s is omitted: %s", part.path, error)
            return
        # Records that were received late are in order only over the whole file, which has as many as a segment.
        yield from frames_of(np.concatenate([np.zeros(0, ROW), *self._file_rows(part, None)]))

    def rows(self, attempt: int, chosen: RowFilter | None = None) -> Iterator[Rows]:
        """Yield the records of an attempt, each once, in parts of bounded size; with a filter its spans alone."""
        clocks: Mapping[RingKey, int] | None = None
        parts, newest = self._listed(attempt, chosen)
        for part in parts:
            if part.file is not None:
                yield from self._file_rows(part, chosen)
                continue
            clocks = ring_offsets(self.newest_rings(attempt)) if clocks is None else clocks
            yield from self._segment_rows(part, chosen, newest, clocks)

    def newest_rings(self, attempt: int) -> dict[RingKey, Mapping[str, Any]]:
        """Return the newest metadata of each ring of an attempt: headers of RING frames."""
        return newest_rings(self.rings(attempt))

    def _segment_rows(
        self, part: Part, chosen: RowFilter | None, newest: dict[RingKey, int], clocks: Mapping[RingKey, int]
    ) -> Iterator[Rows]:
        try:
            content = read_segment(part.path)
        except FileNotFoundError:
            if (moved := self._moved(part)) is not None:
                yield from self._file_rows(moved, chosen)
            return
        collected = collect(content.frames, newest)
        newest |= {key: found.next for key, found in collected.rings.items()}
        set_offsets(collected.rows, step_offsets(content.frames), clocks)
        yield collected.rows if chosen is None else chosen.apply(collected.rows)

    def _file_rows(self, part: Part, chosen: RowFilter | None) -> Iterator[Rows]:
        from megatronapp_analyzer.hub.archive import parquet_files

        if part.file is not None and chosen is not None and not chosen.may_have(part.file):
            return
        try:
            yield from parquet_files.read_rows(part.path, chosen)
        except FileNotFoundError:
            LOG.info("%s was dropped while it was read", part.path)
        except ArchiveError as error:
            if self._catalog is not None:
                self._catalog.note_damaged(part.path, error)

    def _moved(self, part: Part) -> Part | None:
        """Return the file of the archive to which a segment was moved since it was listed; None if it was dropped."""
        if self._catalog is None:
            return None
        file = self._catalog.file(part.attempt, part.segment)
        if file is None:
            self._catalog.refresh()
            file = self._catalog.file(part.attempt, part.segment)
        return None if file is None else dataclasses.replace(part, file=file, path=file.path)

    def _files(self, attempt: int | None) -> list[ArchiveFile]:
        return [] if self._catalog is None else self._catalog.files(attempt)


def newest_rings(found: Iterator[Frame]) -> dict[RingKey, Mapping[str, Any]]:
    """Return the newest header of each ring among RING frames; skips frames without a worker."""
    rings: dict[RingKey, Mapping[str, Any]] = {}
    for frame in found:
        worker, rank = frame.header.get("worker"), frame.header.get("rank")
        if isinstance(worker, int) and (rank is None or isinstance(rank, int)):
            rings[worker, rank] = frame.header
    return rings


def read_rings(path: pathlib.Path) -> list[Mapping[str, Any]]:
    """Return the headers of the RING frames in a file of the archive. Raises ArchiveError."""
    from megatronapp_analyzer.hub.archive import parquet_files

    return parquet_files.read_rings(path)
