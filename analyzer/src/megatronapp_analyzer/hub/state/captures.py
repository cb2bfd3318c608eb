"""Captured steps of a training in the hub, and on its disk."""

import logging
import pathlib

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.ingest.frame_files import read_frames
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits
from megatronapp_analyzer.hub.state.capture_store import MAX_BYTES, CapturedStep, CaptureStore
from megatronapp_analyzer.hub.state.probe_store import ProbeStore
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType

LOG = logging.getLogger(__name__)


class TrainingCaptures:
    """Captures of one job. Complete steps survive a restart of the hub, and are shown after the job has ended."""

    def __init__(
        self, path: pathlib.Path | None, *, disk_bytes: int = SpoolLimits().captures_bytes, writable: bool = True
    ) -> None:
        """Read what is stored. `disk_bytes`: most bytes of the captures' file, and of the files of probe texts."""
        self._path = path
        self._disk_bytes = disk_bytes
        self._writable = writable
        self._failed = False
        self._left_out = False
        self.store = CaptureStore(max_bytes=min(MAX_BYTES, disk_bytes))
        self.texts = ProbeStore(
            None if path is None else path.with_name("probes"), disk_bytes=disk_bytes, writable=writable
        )
        self.rejected = 0
        self._sending: set[tuple[int, int]] = set()
        """Attempts and workers whose ranks have begun to capture and have not ended."""
        if path is not None:
            self._restore(path)
        if not writable:
            self.store.end()

    def _restore(self, path: pathlib.Path) -> None:
        """Read what is stored. The next step replaces a torn file, of which only the beginning can be read."""
        nbytes = 0
        for frame in read_frames(path):
            nbytes += len(frames.encode(frame))
            try:
                self.store.restore(frame)
            except (FrameError, ProtocolError) as error:
                LOG.warning("%s: a captured step is skipped: %s", path, error)
        if path.exists() and path.stat().st_size != nbytes:
            self.store.thinned = True

    def take_frame(self, frame: Frame, *, attempt: int, worker: int) -> None:
        """Take a frame of a rank of a worker; one that cannot be used is counted and skipped, as its agent carries
        others, too.
        """
        try:
            if frame.type == FrameType.TRAINING_RANK:
                self.store.take_rank(frame)
                self._sending.add((attempt, worker))
            elif frame.type == FrameType.TRAINING_PROBE:
                self.texts.take(frame)
            elif (step := self.store.take(frame)) is not None:
                self._write([step], append=not self.store.thinned)
        except (FrameError, ProtocolError) as error:
            self.rejected += 1
            LOG.warning("the capture of a rank is skipped: %s", error)

    def end_worker(self, attempt: int, worker: int) -> None:
        """The ranks of a worker have ended. After the last one store and show what they left incomplete."""
        if (attempt, worker) not in self._sending:
            return
        self._sending.remove((attempt, worker))
        if any(other == attempt for other, _ in self._sending):
            return
        self.store.end()
        self._write(self.store.incomplete(), append=True)

    def _write(self, steps: list[CapturedStep], *, append: bool) -> None:
        if self._path is None or not self._writable:
            return
        try:
            data = b"".join(frames.encode(step.frame()) for step in steps) if append else b""
            if append and self._size() + len(data) <= self._disk_bytes:
                with self._path.open("ab", buffering=0) as file:
                    if file.write(data) != len(data):
                        raise OSError("there is too little space")
            else:
                replacement = self._path.with_suffix(".new")
                replacement.write_bytes(b"".join(self._newest_frames()))
                replacement.replace(self._path)
                self.store.thinned = False
        except OSError as error:
            if not self._failed:
                LOG.error("%s: cannot be written: %s; free some space; the live view continues", self._path, error)
            self._failed = True
            self.store.thinned = True  # part of it may have been written

    def _size(self) -> int:
        """Return the size of the file. Raises OSError."""
        assert self._path is not None
        return self._path.stat().st_size if self._path.exists() else 0

    def _newest_frames(self) -> list[bytes]:
        """Return as many of the newest steps as the disk has space for, ascending."""
        found: list[bytes] = []
        left = self._disk_bytes
        for step in reversed(self.store.all_steps()):
            data = frames.encode(step.frame())
            if len(data) > left:
                self._note_left_out()
                continue
            left -= len(data)
            found.append(data)
        return found[::-1]

    def _note_left_out(self) -> None:
        if not self._left_out:
            LOG.warning(
                "%s: has space for %d bytes, too little for all captured steps of the live view; "
                "write a larger spec.analyzer.volume.sizeLimit",
                self._path,
                self._disk_bytes,
            )
        self._left_out = True
