"""Traces on disk, so that a hub that was killed has them when it restarts and `trace export` works after the job.

    <directory>/attempt-<n>/rings.frames            RING frames, the newest of a ring is used
                            digests.frames          one DIGEST frame per finished step
                            curves.frames           CURVE frames: points of the curves
                            records-<seq>.frames    RECORDS frames as they were received, in segments

Every file is a run of wire frames; an incomplete frame at the end of a file is skipped when reading. Each append is one
write() to a file opened with O_APPEND, so what a killed hub has written is whole. The record segments of all attempts
together stay under a budget: the oldest segment is deleted.
"""

import dataclasses
import enum
import json
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from megatronapp_analyzer.errors import SpoolError
from megatronapp_common import frames
from megatronapp_common.errors import FrameError

LOG = logging.getLogger(__name__)


class SpoolFrame(enum.IntEnum):
    """Frames that only the spool holds; never on the wire."""

    DIGEST = 128
    CURVE = 129


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpoolLimits:
    """Limits of the disk space that the hub uses."""

    segment_bytes: int = 16 << 20
    total_bytes: int = 512 << 20
    """Bytes of record segments of all attempts; digests and curves are extra, some 100 bytes per step and rank."""


def read_frames(path: pathlib.Path) -> Iterator[frames.Frame]:
    """Yield the whole frames of a file; none if it is missing. Stops at an incomplete or garbled frame."""
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        return
    while len(data) >= frames.PREFIX.size:
        try:
            length = frames.frame_length(data)
            if length > len(data):
                return
            yield frames.decode(data[:length])
        except FrameError as error:
            LOG.warning("%s: the rest is left out: %s", path, error)
            return
        data = data[length:]


class JsonFile:
    """A JSON document on disk, always whole. While the disk is full it may become old, which is logged once."""

    def __init__(self, path: pathlib.Path | None, *, writable: bool = True) -> None:
        self._path = path
        self._writable = writable
        self._failed = False

    def read(self) -> Any:  # noqa: ANN401 (JSON has no narrower type)
        """Return the document, or None if it is missing."""
        if self._path is None:
            return None
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
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
                LOG.error("%s: cannot be written: %s; free some space; the live view goes on", self._path, error)
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
        return read_frames(self._folder(attempt) / "digests.frames")

    def curves(self, attempt: int) -> Iterator[frames.Frame]:
        """Yield the CURVE frames of an attempt."""
        return read_frames(self._folder(attempt) / "curves.frames")

    def segments(self, attempt: int) -> list[pathlib.Path]:
        """Return the files with records, oldest first."""
        return sorted(self._folder(attempt).glob("records-*.frames"))

    def _folder(self, attempt: int) -> pathlib.Path:
        return self._directory / f"attempt-{attempt:04d}"


class SpoolWriter:
    """Writer of stored traces. When the disk is full it stops writing, logs that once and counts."""

    def __init__(self, directory: pathlib.Path, limits: SpoolLimits) -> None:
        self._directory = directory
        self._limits = limits
        self._files: dict[pathlib.Path, int] = {}
        self._segment: dict[int, tuple[pathlib.Path, int]] = {}
        self.failed_writes = 0
        self._closed_segments = self._existing_segments()

    def append_ring(self, attempt: int, frame: bytes) -> None:
        """Append a RING frame."""
        self._append(self._folder(attempt) / "rings.frames", frame)

    def append_digest(self, attempt: int, frame: bytes) -> None:
        """Append a DIGEST frame."""
        self._append(self._folder(attempt) / "digests.frames", frame)

    def append_curve(self, attempt: int, frame: bytes) -> None:
        """Append a CURVE frame."""
        self._append(self._folder(attempt) / "curves.frames", frame)

    def append_records(self, attempt: int, frame: bytes) -> None:
        """Append a RECORDS frame; begins a new segment, and deletes the oldest, as the limits require."""
        path, size = self._segment.get(attempt) or (self._next_segment(attempt), 0)
        if size and size + len(frame) > self._limits.segment_bytes:
            self._close_segment(path, size)
            path, size = self._next_segment(attempt), 0
        self._append(path, frame)
        self._segment[attempt] = (path, size + len(frame))

    def close(self) -> None:
        """Close the files of all attempts."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _folder(self, attempt: int) -> pathlib.Path:
        return self._directory / f"attempt-{attempt:04d}"

    def _append(self, path: pathlib.Path, frame: bytes) -> None:
        try:
            descriptor = self._open(path)
            written = os.write(descriptor, frame)
            if written != len(frame):  # readers stop at a torn frame, so none must stay in front of later ones
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(f"{written} of {len(frame)} bytes written")
        except OSError as error:
            self._note_failure(path, error)

    def _open(self, path: pathlib.Path) -> int:
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        return self._files[path]

    def _note_failure(self, path: pathlib.Path, error: OSError) -> None:
        if not self.failed_writes:
            LOG.error("%s: cannot store traces: %s; free some space; the live view goes on", path, error)
        self.failed_writes += 1

    def _next_segment(self, attempt: int) -> pathlib.Path:
        taken = SpoolReader(self._directory).segments(attempt)
        number = int(taken[-1].stem.removeprefix("records-")) + 1 if taken else 0
        return self._folder(attempt) / f"records-{number:06d}.frames"

    def _existing_segments(self) -> list[tuple[pathlib.Path, int]]:
        reader = SpoolReader(self._directory)
        try:
            paths = [path for attempt in reader.attempts() for path in reader.segments(attempt)]
        except (OSError, ValueError) as error:
            raise SpoolError(
                f"{self._directory}: cannot read stored traces: {error}; use another --state-dir"
            ) from error
        return [(path, path.stat().st_size) for path in paths]

    def _close_segment(self, path: pathlib.Path, size: int) -> None:
        if (descriptor := self._files.pop(path, None)) is not None:
            os.close(descriptor)
        self._closed_segments.append((path, size))
        while sum(size for _, size in self._closed_segments) > self._limits.total_bytes - self._limits.segment_bytes:
            oldest, _ = self._closed_segments.pop(0)
            oldest.unlink(missing_ok=True)
