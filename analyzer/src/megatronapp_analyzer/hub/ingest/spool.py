"""Traces on disk, so that a hub that was killed has them when it restarts and `trace export` works after the job.

    <directory>/attempt-<n>/rings.frames            RING frames, the newest of a ring is used
                            digests.frames          one DIGEST frame per finished step
                            digests-older.frames    those before, once digests.frames is large
                            curves.frames           CURVE frames: points of the curves; curves-older.frames
                            records-<seq>.frames    RECORDS frames as they were received, and CLOCK frames, in segments

Every file is a run of wire frames; an incomplete frame at the end of a file is skipped when reading. Each append is one
write() to a file opened with O_APPEND. A hub that is killed within it may leave an incomplete frame: the next hub
begins new segments of records, and cuts other files off after their last whole frame before it appends to them. Frames
have no checksum: one is whole if its lengths agree and its header can be read. The record segments of all attempts
together stay under a budget: the oldest segment is deleted; so do the digests and curves. The hub writes in a thread:
what still waits there when the hub is killed is lost to the spool. The next hub of the job gets it from the agents, as
long as they run and their rings hold it.
"""

import dataclasses
import enum
import json
import logging
import os
import pathlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from megatronapp_analyzer.errors import SpoolError
from megatronapp_analyzer.hub.ingest.frame_files import read_frames, truncate_to_frames
from megatronapp_common import frames

LOG = logging.getLogger(__name__)
WAITING_BYTES = 64 << 20
"""Bytes of frames that wait for the disk; beyond it records, and at twice as many also sums, are dropped."""
HOUR_S = 3600
DIGESTS, CURVES = "digests.frames", "curves.frames"
SUM_FILES = 8
"""Number of full files of digests and curves that fit into their limit; an attempt has at most four."""
CLOSE_S = 3.0
"""Seconds that the end of a hub waits for the disk; backends kill a hub later than that (their STOP_S and GRACE_S)."""
RING_ATTEMPTS = 2
"""Number of attempts whose rings are written again if their file vanishes."""


class SpoolFrame(enum.IntEnum):
    """Frames that only the spool holds; never on the wire."""

    DIGEST = 128
    CURVE = 129
    CLOCK = 130
    """Real time minus the clock of each rank at a step; among the records."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpoolLimits:
    """Limits of the disk space that the hub uses."""

    segment_bytes: int = 16 << 20
    total_bytes: int = 512 << 20
    """Bytes of record segments of all attempts."""
    sums_bytes: int = 512 << 20
    """Bytes of digests, 16 per step and rank, and curves, some 200 per step: of more, the oldest are deleted."""
    archive_bytes: int = 5 << 30
    """Bytes of the archive, to which closed segments are moved."""
    captures_bytes: int = 640 << 20
    """Most bytes of captures of a training, and as many of its probe texts, however few steps these are."""


def segment_number(path: pathlib.Path) -> int | None:
    """Return the number of a segment; None for another file."""
    number = path.stem.removeprefix("records-")
    return int(number) if number.isdecimal() else None


def older_sums(path: pathlib.Path) -> pathlib.Path:
    """Return where the digests or curves before those of a file are."""
    return path.with_name(f"{path.stem}-older.frames")


class JsonFile:
    """A JSON document on disk, always whole. While the disk is full it may become old, which is logged once."""

    def __init__(self, path: pathlib.Path | None, *, writable: bool = True) -> None:
        self._path = path
        self._writable = writable
        self._failed = False

    @property
    def path(self) -> pathlib.Path | None:
        """Return where the document is."""
        return self._path

    def read(self) -> Any:  # noqa: ANN401 (JSON has no narrower type)
        """Return the document; None if it is missing, or damaged, as after a power failure, which is logged."""
        if self._path is None:
            return None
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            LOG.error("%s: is damaged (%s); a new file is begun", self._path, error)
            return None

    def write(self, document: object) -> None:
        """Replace the document; does nothing without a path, or where it is only read."""
        if self._path is None or not self._writable:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_text(json.dumps(document), encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            if not self._failed:
                LOG.error("%s: cannot be written: %s; free some space; the live view continues", self._path, error)
            self._failed = True
        else:
            self._failed = False


class SpoolReader:
    """Stored traces of one job."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory

    def attempts(self) -> list[int]:
        """Return the attempts that left traces, ascending."""
        return sorted(int(path.name.removeprefix("attempt-")) for path in self._directory.glob("attempt-*"))

    def rings(self, attempt: int) -> Iterator[frames.Frame]:
        """Yield the RING frames of an attempt."""
        return read_frames(self._folder(attempt) / "rings.frames")

    def digests(self, attempt: int) -> Iterator[frames.Frame]:
        """Yield the DIGEST frames of an attempt."""
        return self._sums(attempt, DIGESTS)

    def curves(self, attempt: int) -> Iterator[frames.Frame]:
        """Yield the CURVE frames of an attempt."""
        return self._sums(attempt, CURVES)

    def _sums(self, attempt: int, name: str) -> Iterator[frames.Frame]:
        current = self._folder(attempt) / name
        yield from read_frames(older_sums(current))
        yield from read_frames(current)

    def segments(self, attempt: int) -> list[pathlib.Path]:
        """Return the files with records, oldest first."""
        return sorted(self._folder(attempt).glob("records-*.frames"))

    def _folder(self, attempt: int) -> pathlib.Path:
        return self._directory / f"attempt-{attempt:04d}"


class SpoolWriter:
    """Writer of stored traces. What a full disk or a vanished file costs is logged once and counted; nothing is raised.

    A file or folder that was deleted is made again, with the rings, without which records cannot be read.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        limits: SpoolLimits,
        *,
        first_segment: Callable[[int], int] = lambda _: 0,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Begin new segments. `first_segment`: least number for those of an attempt, which the archive has not."""
        self._directory = directory
        self._limits = limits
        self._first_segment = first_segment
        self._now_s = now_s
        self.on_closed: Callable[[int, pathlib.Path], None] = lambda _attempt, _path: None
        """Called with the attempt of a segment that is written no more."""
        self.dropped_segments = 0
        """Number of segments that were deleted for space while they were in the spool."""
        self._files: dict[pathlib.Path, int] = {}
        self._known: set[pathlib.Path] = set()
        """Files that have whole frames alone, apart from those that this writer takes back."""
        self._segment: dict[int, tuple[pathlib.Path, int]] = {}
        self._hour: dict[int, int] = {}
        """Hour in which the segment of an attempt was begun."""
        self._clocks: dict[int, bytes] = {}
        """Newest CLOCK frame of each attempt."""
        self._newest: dict[int, int] = {}
        """Number of the newest segment of each attempt."""
        self._rings: dict[int, dict[object, bytes]] = {}
        self._failing = False
        self.failed_writes = 0
        self._closed_segments = self._existing_segments()
        self._compact_rings()

    def append_ring(self, attempt: int, frame: bytes, ring: object = None) -> None:
        """Append a RING frame. `ring`: key of the ring, which is written again if its file vanishes; not if None."""
        self._close_before(attempt)
        self._append(self._folder(attempt) / "rings.frames", frame)
        if ring is None:
            return
        self._rings.setdefault(attempt, {})[ring] = frame
        while len(self._rings) > RING_ATTEMPTS:
            del self._rings[min(self._rings)]

    def _compact_rings(self) -> None:
        """Leave the newest frame of each ring: every hub writes again what its agents send."""
        reader = SpoolReader(self._directory)
        for attempt in reader.attempts():
            found = list(reader.rings(attempt))
            newest = {(frame.header.get("worker"), frame.header.get("rank")): frame for frame in found}
            if len(newest) == len(found):
                continue
            path = self._folder(attempt) / "rings.frames"
            try:
                path.with_suffix(".new").write_bytes(b"".join(map(frames.encode, newest.values())))
                path.with_suffix(".new").replace(path)
            except OSError as error:
                self._note_failure(path, error)

    def append_digest(self, attempt: int, frame: bytes) -> None:
        """Append a DIGEST frame."""
        self._append_sum(self._folder(attempt) / DIGESTS, frame)

    def append_curve(self, attempt: int, frame: bytes) -> None:
        """Append a CURVE frame."""
        self._append_sum(self._folder(attempt) / CURVES, frame)

    def append_records(self, attempt: int, frame: bytes) -> None:
        """Append a RECORDS frame; begins a new segment, and deletes the oldest, as hours and limits require."""
        hour = int(self._now_s() // HOUR_S)
        path, size = self._segment.get(attempt) or (self._next_segment(attempt), 0)
        if size and (size + len(frame) > self._limits.segment_bytes or self._hour[attempt] != hour):
            self._close_segment(attempt, path, size)
            path, size = self._next_segment(attempt), 0
        if not size:
            self._hour[attempt] = hour
            if (clock := self._clocks.get(attempt)) is not None and clock is not frame:
                self._append(path, clock)
                size = len(clock)
        self._append(path, frame)
        self._segment[attempt] = (path, size + len(frame))

    def append_clock(self, attempt: int, frame: bytes) -> None:
        """Append a CLOCK frame to the records, and at the begin of each segment until the next one."""
        self._clocks[attempt] = frame
        self.append_records(attempt, frame)

    def _close_before(self, attempt: int) -> None:
        """Close the files of older attempts, which get no more frames as a rule, and begin new segments if they do."""
        for older in [number for number in self._segment if number < attempt]:
            path, size = self._segment.pop(older)
            self._close_segment(older, path, size)
        folder = self._folder(attempt)
        for path in [path for path in self._files if path.parent < folder]:
            self._close_file(path)

    def close(self) -> None:
        """Close the files of all attempts."""
        for path in list(self._files):
            self._close_file(path)
        for attempt, (path, _) in self._segment.items():
            self.on_closed(attempt, path)
        self._segment.clear()

    def _folder(self, attempt: int) -> pathlib.Path:
        return self._directory / f"attempt-{attempt:04d}"

    def _append(self, path: pathlib.Path, frame: bytes) -> None:
        try:
            descriptor = self._open(path)
            if os.fstat(descriptor).st_nlink == 0:
                descriptor = self._make_again(path)
            written = os.write(descriptor, frame)
            if written != len(frame):  # readers stop at a torn frame, so none must stay in front of later ones
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(f"{written} of {len(frame)} bytes written")
        except OSError as error:
            self._note_failure(path, error)
        else:
            self._failing = False

    def _append_sum(self, path: pathlib.Path, frame: bytes) -> None:
        """Append to digests or curves; a file that is full takes the place of the older one, which is deleted."""
        self._append(path, frame)
        try:
            if path not in self._files or os.fstat(self._files[path]).st_size < self._limits.sums_bytes // SUM_FILES:
                return
            self._close_file(path)
            path.replace(older_sums(path))
            self._bound_sums()
        except OSError as error:
            self._note_failure(path, error)

    def _bound_sums(self) -> None:
        """Delete digests and curves of the oldest attempts until there is space for those that are written."""
        found = [path for name in (DIGESTS, CURVES) for path in self._directory.glob(f"*/{pathlib.Path(name).stem}*")]
        oldest = sorted((path for path in found if path not in self._files), key=lambda path: path.stat().st_mtime_ns)
        sizes = {path: path.stat().st_size for path in found}
        while oldest and sum(sizes.values()) > self._limits.sums_bytes * 3 // 4:
            del sizes[oldest[0]]
            oldest.pop(0).unlink()

    def _make_again(self, path: pathlib.Path) -> int:
        """Return the descriptor of a new file in place of one that was deleted, which is a failure, too."""
        self._note_failure(path, OSError("it was deleted while the hub writes it; what it held is lost"))
        self._close_file(path)
        rings = path.parent / "rings.frames"
        if path == rings or not rings.exists():
            self._close_file(rings)
            attempt = int(path.parent.name.removeprefix("attempt-"))
            for frame in self._rings.get(attempt, {}).values():
                os.write(self._open(rings), frame)
        return self._open(path)

    def _close_file(self, path: pathlib.Path) -> None:
        if (descriptor := self._files.pop(path, None)) is None:
            return
        try:
            os.close(descriptor)
        except OSError as error:  # a network file system may report here what it could not write
            self._note_failure(path, error)

    def _open(self, path: pathlib.Path) -> int:
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path not in self._known:
                if path.is_file():  # of an earlier hub, which may have been killed while it wrote
                    truncate_to_frames(path)
                self._known.add(path)
            self._files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        return self._files[path]

    def _note_failure(self, path: pathlib.Path, error: OSError) -> None:
        if not self._failing:
            LOG.error("%s: cannot store traces: %s; free some space; the live view continues", path, error)
        self._failing = True
        self.failed_writes += 1

    def _next_segment(self, attempt: int) -> pathlib.Path:
        taken = (segment_number(path) for path in SpoolReader(self._directory).segments(attempt))
        number = max((number + 1 for number in taken if number is not None), default=0)
        # Segments that were moved to the archive are not in the folder any more.
        number = max(number, self._first_segment(attempt), self._newest.get(attempt, -1) + 1)
        self._newest[attempt] = number
        return self._folder(attempt) / f"records-{number:06d}.frames"

    def _existing_segments(self) -> list[tuple[pathlib.Path, int]]:
        reader = SpoolReader(self._directory)
        try:
            paths = [path for attempt in reader.attempts() for path in reader.segments(attempt)]
            return [(path, path.stat().st_size) for path in paths]
        except (OSError, ValueError) as error:
            raise SpoolError(
                f"{self._directory}: cannot read stored traces: {error}; use another --state-dir"
            ) from error

    def _close_segment(self, attempt: int, path: pathlib.Path, size: int) -> None:
        self._close_file(path)
        self._closed_segments.append((path, size))
        self.on_closed(attempt, path)
        while sum(size for _, size in self._closed_segments) > self._limits.total_bytes - self._limits.segment_bytes:
            oldest, _ = self._closed_segments.pop(0)
            try:
                oldest.unlink()
                self.dropped_segments += 1
            except FileNotFoundError:
                pass  # it was moved to the archive
            except OSError as error:
                self._note_failure(oldest, error)


class SpoolThread:
    """Writer of stored traces in a thread, in the order of the calls: a slow disk delays nothing but itself."""

    def __init__(self, writer: SpoolWriter, *, limit_bytes: int = WAITING_BYTES) -> None:
        self._writer = writer
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._writing = False
        """True while a frame is with the writer."""
        self._closing = False
        self._dropping = False
        self._errors = 0
        self.dropped_frames = 0
        # Must not keep the process alive: a disk may hang for good.
        self._thread = threading.Thread(target=self._write_all, name="spool", daemon=True)
        self._thread.start()

    @property
    def dropped_segments(self) -> int:
        """Return the number of segments that were deleted for space while they were in the spool."""
        return self._writer.dropped_segments

    @property
    def failed_writes(self) -> int:
        """Return the number of frames that could not be written."""
        return self._writer.failed_writes + self._errors

    def append_ring(self, attempt: int, frame: bytes, ring: object) -> None:
        """Append a RING frame; never dropped, because records cannot be read without it."""
        self._put(frame, lambda: self._writer.append_ring(attempt, frame, ring), limit_bytes=None)

    def append_digest(self, attempt: int, frame: bytes) -> None:
        """Append a DIGEST frame."""
        self._put(frame, lambda: self._writer.append_digest(attempt, frame), limit_bytes=2 * self._limit_bytes)

    def append_curve(self, attempt: int, frame: bytes) -> None:
        """Append a CURVE frame."""
        self._put(frame, lambda: self._writer.append_curve(attempt, frame), limit_bytes=2 * self._limit_bytes)

    def append_records(self, attempt: int, frame: bytes) -> None:
        """Append a RECORDS frame."""
        self._put(frame, lambda: self._writer.append_records(attempt, frame), limit_bytes=self._limit_bytes)

    def append_clock(self, attempt: int, frame: bytes) -> None:
        """Append a CLOCK frame."""
        self._put(frame, lambda: self._writer.append_clock(attempt, frame), limit_bytes=2 * self._limit_bytes)

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Write what waits and close the files, but wait no longer than `patience_s` for the disk."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            with self._changed:
                left = len(self._waiting) + self._writing
            LOG.error("the disk is too slow: %d frames of traces are not stored after %g s", left, patience_s)

    def wait_until_written(self) -> None:
        """Block until nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes == 0)

    def _put(self, frame: bytes, write: Callable[[], None], *, limit_bytes: int | None) -> None:
        with self._changed:
            if limit_bytes is not None and self._waiting_bytes + len(frame) > limit_bytes:
                self.dropped_frames += 1
                if not self._dropping:
                    LOG.error("the disk is too slow: frames of traces are dropped; the live view continues")
                self._dropping = True
                return
            self._waiting.append((len(frame), write))
            self._waiting_bytes += len(frame)
            self._changed.notify_all()

    def _write_all(self) -> None:
        while (task := self._next()) is not None:
            size, write = task
            try:
                write()
            except Exception:
                self._errors += 1
                LOG.exception("a frame of traces is not stored")
            with self._changed:
                self._waiting_bytes -= size
                self._writing = False
                self._changed.notify_all()
        self._writer.close()

    def _next(self) -> tuple[int, Callable[[], None]] | None:
        """Wait for the next frame; None at the end."""
        with self._changed:
            while not self._waiting:
                self._dropping = False
                if self._closing:
                    return None
                self._changed.wait()
            self._writing = True
            return self._waiting.popleft()
