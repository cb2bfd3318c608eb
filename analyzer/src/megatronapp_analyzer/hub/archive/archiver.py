"""Thread that moves closed segments of the spool into the archive, one after the other."""

import errno
import logging
import pathlib
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatronapp_analyzer.hub.archive import names
from megatronapp_analyzer.hub.archive.catalog import Catalog, open_file
from megatronapp_analyzer.hub.archive.clocks import ring_offsets, set_offsets, step_offsets
from megatronapp_analyzer.hub.archive.ring_rows import ring_rows
from megatronapp_analyzer.hub.archive.rows import CollectedRows, collect, real_ns
from megatronapp_analyzer.hub.archive.segments import read_segment
from megatronapp_analyzer.hub.archive.stored import newest_rings
from megatronapp_analyzer.hub.ingest.ingest import RingKey
from megatronapp_analyzer.hub.ingest.spool import SpoolReader, segment_number

LOG = logging.getLogger(__name__)
RETRY_S = 30.0
"""Seconds after which a segment is tried again that could not be written, as on a full disk."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Archiver:
    """Mover of segments in a thread.

    The spool has what is not archived: nothing is lost if the thread ends anywhere.
    """

    def __init__(
        self, spool: pathlib.Path, catalog: Catalog, *, retry_s: float = RETRY_S, makes_space: bool = False
    ) -> None:
        """Create without starting. `makes_space`: old hours are deleted where the disk is full."""
        self._spool = SpoolReader(spool)
        self._catalog = catalog
        self._retry_s = retry_s
        self._waiting: deque[tuple[int, pathlib.Path]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._rings: dict[tuple[str, int], Mapping[RingKey, Mapping[str, Any]]] = {}
        """Rings that were written, by hour and attempt."""
        self._makes_space = makes_space
        self._freed_for: pathlib.Path | None = None
        """Segment for which older hours were deleted on a full disk."""
        self.failed_writes = 0
        """Number of times that a file could not be written."""
        self.damaged = 0
        """Number of segments of which not everything could be read; they are in quarantine."""
        self.records = 0
        """Number of records moved."""
        # Must not keep the process alive: a disk may hang for good.
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)

    def start(self) -> None:
        """Start the thread, with all segments that an earlier hub has left."""
        for attempt in self._spool.attempts():
            for path in self._spool.segments(attempt):
                self.add(attempt, path)
        self._thread.start()

    def add(self, attempt: int, path: pathlib.Path) -> None:
        """Queue a segment that is written no more."""
        with self._changed:
            self._waiting.append((attempt, path))
            self._changed.notify_all()

    def close(self, patience_s: float) -> None:
        """Move what waits, but wait no longer than `patience_s`: the spool has the rest for the next hub."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, patience_s))

    @property
    def waiting(self) -> int:
        """Return the number of closed segments that are not archived yet."""
        return len(self._waiting)

    def wait_until_idle(self) -> None:
        """Block until nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def _run(self) -> None:
        while (segment := self._next()) is not None:
            is_moved = self._try(*segment)
            with self._changed:
                if is_moved:
                    self._waiting.popleft()
                    self._changed.notify_all()
                elif self._closing or self._changed.wait_for(lambda: self._closing, self._retry_s):
                    return

    def _next(self) -> tuple[int, pathlib.Path] | None:
        """Wait for the next segment; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting else None

    def _try(self, attempt: int, path: pathlib.Path) -> bool:
        """Move a segment; return false if it is to be tried again."""
        try:
            self._move_with_space(attempt, path)
        except (OSError, MemoryError) as error:
            if not path.exists():
                LOG.warning("%s was deleted before it was archived", path)
                return True
            if not self.failed_writes:
                LOG.error("%s cannot be archived: %s; free some space; the spool keeps it meanwhile", path, error)
            self.failed_writes += 1
            return False
        except Exception:
            LOG.exception("%s cannot be archived", path)
            self.damaged += 1
            self._catalog.quarantine(path)
        return True

    def _move_with_space(self, attempt: int, path: pathlib.Path) -> None:
        """Move a segment; on a full disk, delete older hours and try again. Raises OSError.

        Older hours are deleted once for a segment: what others write on the disk may take the space each time.
        """
        try:
            self._move(attempt, path)
        except OSError as error:
            if not self._makes_space or error.errno not in FULL or path == self._freed_for:
                raise
            if self._freed_for is None:
                limit = self._catalog.limit_bytes
                LOG.warning("the disk is full before the archive has its %d bytes: old hours are deleted", limit)
            self._freed_for = path
            if not self._catalog.make_space(2 * path.stat().st_size):  # the next segment of the spool needs some, too
                raise
            self._move(attempt, path)

    def _move(self, attempt: int, path: pathlib.Path) -> None:
        number = segment_number(path)
        if number is None:
            return
        is_whole = True
        if self._catalog.file(attempt, number) is None:  # else a hub was killed before it deleted the segment
            is_whole = self._archive(attempt, number, path)
        if is_whole:
            path.unlink(missing_ok=True)
        else:
            self.damaged += 1
            self._catalog.quarantine(path)

    def _archive(self, attempt: int, number: int, path: pathlib.Path) -> bool:
        """Write the records of a segment; return false if some of it could not be read. Raises OSError."""
        content = read_segment(path)
        collected = collect(content.frames, self._catalog.next_indices(attempt))
        if content.unreadable or collected.malformed:
            LOG.error(
                "%s: %d of %d bytes and %d frames cannot be read and are omitted",
                path,
                content.unreadable,
                content.size,
                collected.malformed,
            )
        if len(collected.rows):
            rings = newest_rings(self._spool.rings(attempt))
            set_offsets(collected.rows, step_offsets(content.frames), ring_offsets(rings))
            self._write(attempt, number, collected, rings)
        return not content.unreadable and not collected.malformed

    def _write(
        self, attempt: int, number: int, collected: CollectedRows, rings: Mapping[RingKey, Mapping[str, Any]]
    ) -> None:
        from megatronapp_analyzer.hub.archive import parquet_files

        starts = real_ns(collected.rows)
        middle = len(starts) // 2
        folder = self._catalog.folder / names.hour_of(int(np.partition(starts, middle)[middle]))
        rings_path = folder / names.rings_name(attempt)
        is_new = self._rings.get((folder.name, attempt)) != rings
        if is_new and (rings or not rings_path.exists()):  # a spool that has lost its rings takes none from the archive
            parquet_files.write_rings(rings_path, ring_rows(attempt, rings))
            self._rings = {key: found for key, found in self._rings.items() if key[1] != attempt}
            self._rings[folder.name, attempt] = rings
        target = folder / names.records_name(attempt, number)
        parquet_files.write_records(target, attempt, collected)
        self._catalog.add(open_file(target))
        self.records += len(collected.rows)
        parquet_files.release_memory()
