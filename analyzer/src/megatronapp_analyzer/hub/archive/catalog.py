"""Files of the archive of a job: which there are, what each holds, and which were dropped or damaged."""

import bisect
import contextlib
import dataclasses
import logging
import pathlib
import threading
from collections.abc import Callable, Sequence

from megatronapp_analyzer.errors import ArchiveError, DamagedArchiveError
from megatronapp_analyzer.hub.archive import names
from megatronapp_analyzer.hub.archive.quarantine import Quarantine
from megatronapp_analyzer.hub.archive.values import ArchiveFile
from megatronapp_analyzer.hub.ingest.ingest import RingKey
from megatronapp_analyzer.hub.ingest.spool import JsonFile

LOG = logging.getLogger(__name__)
RESERVE = 16
"""Part of the archive that is deleted where the disk is full, in addition to what is needed at once."""
SegmentKey = tuple[int, int]
"""Key (attempt, segment) of a segment of the spool, wherever its records are."""


@dataclasses.dataclass(kw_only=True, slots=True)
class DroppedHours:
    """Files that were deleted for space since the job began."""

    files: int = 0
    records: int = 0
    bytes: int = 0
    until: str | None = None
    """Newest hour of which files were deleted."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedHour:
    """Files of one hour and attempt."""

    hour: str
    attempt: int
    first_step: int | None
    last_step: int | None
    records: int
    bytes: int


class Catalog:
    """Files of the archive in a folder of a job. Threads may share it; files that are returned may be dropped later."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        limit_bytes: int = 1 << 62,
        writable: bool = False,
        chosen: Callable[[pathlib.Path], bool] = lambda _: True,
    ) -> None:
        """Read the footers of all files, or of those that are `chosen`.

        If `writable`, damaged files are moved to quarantine and leftovers deleted.
        """
        self._chosen = chosen
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._writable = writable
        self._quarantine = Quarantine(folder / names.QUARANTINE, limit_bytes=limit_bytes)
        if writable:  # the limit may have been larger
            self._quarantine.bound()
        self._lock = threading.Lock()
        self._files: dict[SegmentKey, ArchiveFile] = {}
        self._next: dict[int, dict[RingKey, int]] = {}
        self._dropped_file = JsonFile(folder / "dropped.json", writable=writable)
        self.dropped = _read_dropped(self._dropped_file)
        self.damaged = 0
        """Number of files that could not be read."""
        self._noted: set[pathlib.Path] = set()
        """Files that are counted in `damaged`."""
        self._newest_names: dict[int, int] = {}
        """Number of the newest segment of each attempt by the names of the files, of unreadable ones, too."""
        self._scan()

    def _scan(self) -> None:
        known = {file.path for file in self._files.values()}
        found = set()
        for folder in names.hour_folders(self.folder):
            if self._writable:
                _delete_unfinished(folder)
            for attempt, segment, path in names.records_files(folder):
                self._newest_names[attempt] = max(segment, self._newest_names.get(attempt, -1))
                found.add(path)
                if path in known or not self._chosen(path):
                    continue
                try:
                    file = open_file(path)
                except FileNotFoundError:
                    continue
                except ArchiveError as error:
                    self.note_damaged(path, error)
                else:
                    with self._lock:
                        self._insert(file)
        with self._lock:
            self._files = {key: file for key, file in self._files.items() if file.path in found}

    def _insert(self, file: ArchiveFile) -> None:
        newest = self._next.setdefault(file.attempt, {})
        for key, found in file.rings.items():
            newest[key] = max(newest.get(key, 0), found.next)
        self._files[file.attempt, file.segment] = dataclasses.replace(file, rings={})

    def note_damaged(self, path: pathlib.Path, error: ArchiveError) -> None:
        """Count a file that cannot be read; move it to quarantine if it is damaged and the catalog is writable.

        A file that the system does not open now, or that a newer release wrote, stays where it is.
        """
        if path in self._noted:
            return
        self._noted.add(path)
        self.damaged += 1
        LOG.error("%s", error)
        if not isinstance(error, DamagedArchiveError):
            return
        if self._writable:
            self.quarantine(path)
        with self._lock:
            self._files = {key: file for key, file in self._files.items() if file.path != path}

    def quarantine(self, path: pathlib.Path) -> None:
        """Move a file to quarantine, out of the way of all readers. What cannot be moved stays, and is logged."""
        self._quarantine.take(path)

    def refresh(self) -> None:
        """Read what another process has written or dropped since; does nothing if the catalog is writable."""
        if not self._writable:
            self._scan()

    def snapshot(self, attempt: int) -> tuple[list[ArchiveFile], dict[RingKey, int]]:
        """Return the files of an attempt, and for each ring the index after its newest record in them, at one time."""
        with self._lock:
            files = [file for file in self._files.values() if file.attempt == attempt]
            return sorted(files, key=lambda file: file.segment), dict(self._next.get(attempt, {}))

    def files(self, attempt: int | None = None) -> list[ArchiveFile]:
        """Return the files of an attempt, or of all, in the order in which their records were received."""
        with self._lock:
            found = [file for file in self._files.values() if attempt in (None, file.attempt)]
        return sorted(found, key=lambda file: (file.attempt, file.segment))

    def file(self, attempt: int, segment: int) -> ArchiveFile | None:
        """Return the file with the records of a segment."""
        with self._lock:
            return self._files.get((attempt, segment))

    @property
    def bytes(self) -> int:
        """Return the bytes of all files with records."""
        with self._lock:
            return sum(file.size for file in self._files.values())

    def next_segment(self, attempt: int) -> int:
        """Return the number after the newest segment of an attempt in the archive."""
        newest = max((file.segment for file in self.files(attempt)), default=-1)
        return max(newest, self._newest_names.get(attempt, -1)) + 1

    def next_indices(self, attempt: int) -> dict[RingKey, int]:
        """Return for each ring of an attempt the index after its newest record in the archive."""
        with self._lock:
            return dict(self._next.get(attempt, {}))

    def add(self, file: ArchiveFile) -> list[ArchiveFile]:
        """Add a file that was written; return those that were deleted for space, of the oldest hours first."""
        with self._lock:
            self._insert(file)
        surplus = self.bytes + self._quarantine.bytes - self.limit_bytes
        return self._drop_oldest(surplus, f"the archive has at most {self.limit_bytes} bytes")

    def make_space(self, nbytes: int) -> bool:
        """Delete the quarantine and the oldest hours on a full disk; return false if there was nothing to delete.

        That makes `nbytes` and some reserve, and the archive does not grow again: its limit was too large for the disk.
        The newest file stays.
        """
        before = self._quarantine.clear() + self.bytes
        self._drop_oldest(nbytes + before // RESERVE - (before - self.bytes), "the disk is full")
        after = self.bytes
        if after < before:
            self.limit_bytes = min(self.limit_bytes, after)
        return after < before

    def _drop_oldest(self, nbytes: int, reason: str) -> list[ArchiveFile]:
        """Delete at least `nbytes` of the oldest files, but not the newest file; return them."""
        oldest = sorted(self.files(), key=lambda known: (known.hour, known.attempt, known.segment))
        sizes = [0]
        for known in oldest:
            sizes.append(sizes[-1] + known.size)
        count = min(bisect.bisect_left(sizes, nbytes), len(oldest) - 1) if nbytes > 0 else 0
        # Whole hours, except of the newest one.
        while 0 < count < len(oldest) - 1 and oldest[count].hour == oldest[count - 1].hour != oldest[-1].hour:
            count += 1
        self._drop(oldest[: max(count, 0)], reason)
        return oldest[: max(count, 0)]

    def _drop(self, files: Sequence[ArchiveFile], reason: str) -> None:
        for file in files:
            with self._lock:
                self._files.pop((file.attempt, file.segment), None)
            file.path.unlink(missing_ok=True)
            self.dropped.files += 1
            self.dropped.records += file.records
            self.dropped.bytes += file.size
            self.dropped.until = max(self.dropped.until or "", file.hour)
            self._delete_if_empty(file.path.parent)
            LOG.info("%s was deleted: %s", file.path, reason)
        if files:
            self._dropped_file.write(dataclasses.asdict(self.dropped))

    def _delete_if_empty(self, folder: pathlib.Path) -> None:
        """Delete the folder of an hour, with its rings, once it has no records."""
        if any(names.records_files(folder)):
            return
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    def hours(self) -> list[ArchivedHour]:
        """Return what the archive has, by hour and attempt, oldest first."""
        found: dict[tuple[str, int], list[ArchiveFile]] = {}
        for file in self.files():
            found.setdefault((file.hour, file.attempt), []).append(file)
        return [_hour(hour, attempt, files) for (hour, attempt), files in sorted(found.items())]


def open_file(path: pathlib.Path) -> ArchiveFile:
    """Return what the footer of a file says. Raises FileNotFoundError and ArchiveError."""
    from megatronapp_analyzer.hub.archive import parquet_files  # a hub without files starts without this library

    return parquet_files.open_file(path)


def _hour(hour: str, attempt: int, files: list[ArchiveFile]) -> ArchivedHour:
    ended = [file.ended for file in files if file.ended is not None]
    return ArchivedHour(
        hour=hour,
        attempt=attempt,
        first_step=min((span.least for span in ended), default=None),
        last_step=max((span.most for span in ended), default=None),
        records=sum(file.records for file in files),
        bytes=sum(file.size for file in files),
    )


def _read_dropped(file: JsonFile) -> DroppedHours:
    document = file.read()
    try:
        return DroppedHours() if document is None else DroppedHours(**document)
    except TypeError as error:
        LOG.error("%s: is of another release (%s); a new file is begun", file.path, error)
        return DroppedHours()


def _delete_unfinished(folder: pathlib.Path) -> None:
    for path in folder.glob(f"*{names.UNFINISHED}"):
        with contextlib.suppress(OSError):
            path.unlink()
